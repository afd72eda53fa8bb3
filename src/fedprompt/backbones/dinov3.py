"""Model folders of type `dinov3_vit`: DINOv3, with rotary positions and registers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedprompt.backbones.assemble import assemble
from fedprompt.backbones.key_mapping import fused, renamed
from fedprompt.backbones.model_folder import (
    MOST_BLOCKS,
    activation,
    check_channels,
    check_heads,
    folder_config,
    number,
    side,
    whole,
)
from fedprompt.backbones.preprocessing import folder_preprocessing, preprocessing
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_folder
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken

_TOP = {
    r"embeddings\.cls_token": "cls",
    r"embeddings\.register_tokens": "registers",
    r"embeddings\.patch_embeddings\.(weight|bias)": r"patch.\1",
    r"norm\.(weight|bias)": r"norm.\1",
}
_IN_BLOCK = {
    r"norm([12])\.(weight|bias)": r"norm\1.\2",
    r"attention\.q_proj\.(weight|bias)": r"query.\1",
    r"attention\.k_proj\.(weight|bias)": r"key.\1",
    r"attention\.v_proj\.(weight|bias)": r"value.\1",
    r"attention\.o_proj\.(weight|bias)": r"attention.out.\1",
    r"layer_scale([12])\.lambda1": r"scale\1",
    r"mlp\.gate_proj\.(weight|bias)": r"gate.\1",
    r"mlp\.up_proj\.(weight|bias)": r"up.\1",
    r"mlp\.down_proj\.(weight|bias)": r"mlp.out.\1",
}


def from_folder(folder: Path, settings: BackboneConfig) -> ViT:
    """The transformer of a folder. Its positions fit every resolution and are never interpolated."""
    config = folder_config(folder)
    gated = bool(config.use_gated_mlp)
    check_channels(config)
    if gated and config.hidden_act != "silu":
        raise BackboneError(broken("hidden_act of a gated MLP", "be silu", config.hidden_act))
    shape = ViTShape(
        width=whole(config, "hidden_size"),
        depth=whole(config, "num_hidden_layers", most=MOST_BLOCKS),
        heads=whole(config, "num_attention_heads"),
        mlp_width=whole(config, "intermediate_size"),
        patch=side(config.patch_size, "patch_size"),
        image_size=side(config.image_size, "image_size"),
        extra_tokens=whole(config, "num_register_tokens", least=0),
        norm_eps=number(config, "layer_norm_eps"),
        activation="gelu" if gated else activation(config),
        layer_scale=True,
        mlp="swiglu" if gated else "plain",
        rope_base=number(config, "rope_theta"),
    )
    check_heads(shape.width, shape.heads)
    if shape.width // shape.heads % 4:
        raise BackboneError(broken("the width of a head in config.json", "divide by 4", shape.width // shape.heads))
    own = preprocessing(settings, folder_preprocessing(folder))
    return assemble(_canonical(read_folder(folder, settings.sha256), shape), shape, *own, settings)


def _canonical(state: Mapping[str, Tensor], shape: ViTShape) -> dict[str, Tensor]:
    kept = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    kept = {name: tensor for name, tensor in kept.items() if name != "embeddings.mask_token"}
    named = renamed({_numbered(name): tensor for name, tensor in kept.items()}, _TOP, _IN_BLOCK, "a DINOv3")
    for name, tensor in list(named.items()):  # keys have no bias in the published models
        prefix = name.removesuffix(".query.weight")
        if prefix != name:
            for part in ("query", "key", "value"):
                named.setdefault(f"{prefix}.{part}.bias", tensor.new_zeros(shape.width))
    if shape.mlp == "plain":
        named = {name.replace(".up.", ".mlp.in."): tensor for name, tensor in named.items()}
    return {**fused(named), "positions": torch.zeros(shape.patches, shape.width)}


def _numbered(name: str) -> str:
    return name.replace("layer.", "layers.", 1) if name.startswith("layer.") else name
