"""Model folders of type `siglip` and `siglip2`: SigLIP, SigLIP 2 with a fixed or a free aspect ratio, MedSigLIP.

The image tower has no CLS row: its feature is an attention pooling over all rows, and there is no projection behind it.
Of the text tower the last of all positions is read, which mostly is padding. Logits are scale * <image, text> + bias. SigLIP was
trained with a sigmoid for every pair; here the classes compete in a softmax, in which the bias cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprompt.backbones.assemble import assemble, check_tensors
from fedprompt.backbones.clip import joined
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.key_mapping import CLIP_BLOCK, fused, renamed
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
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.text_tower import PaddedTower, TextShape, text_tensor_shapes
from fedprompt.backbones.tokenizer import Words, lower_case_words
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_folder
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken
from fedprompt.io.bounded_read import read_json

_VISION = {
    r"embeddings\.patch_embedding\.(weight|bias)": r"patch.\1",
    r"embeddings\.position_embedding\.weight": "positions",
    r"post_layernorm\.(weight|bias)": r"norm.\1",
    r"head\.probe": "pool.probe",
    r"head\.attention\.in_proj_(weight|bias)": r"pool.attention.in.\1",
    r"head\.attention\.out_proj\.(weight|bias)": r"pool.attention.out.\1",
    r"head\.layernorm\.(weight|bias)": r"pool.norm.\1",
    r"head\.mlp\.fc1\.(weight|bias)": r"pool.mlp.in.\1",
    r"head\.mlp\.fc2\.(weight|bias)": r"pool.mlp.out.\1",
}
_TEXT = {
    r"embeddings\.token_embedding\.weight": "token.weight",
    r"embeddings\.position_embedding\.weight": "position.weight",
    r"final_layer_norm\.(weight|bias)": r"norm.\1",
    r"head\.(weight|bias)": r"head.\1",
}


def from_folder(folder: Path, settings: BackboneConfig) -> DualEncoder:
    """Both towers of a folder."""
    config = folder_config(folder)
    free = config.model_type == "siglip2"  # images of any aspect ratio, of which we use the square
    shape = _vision_shape(config.vision_config, free)
    own = preprocessing(settings, folder_preprocessing(folder))
    tensors = read_folder(folder, settings.sha256)
    missing = [name for name in ("logit_scale", "logit_bias") if name not in tensors]
    if missing:
        raise BackboneError(f"the weights must be those of a whole SigLIP, got no {missing[0]!r}")
    named = fused(renamed(_part(tensors, "vision_model."), _VISION, CLIP_BLOCK, "a SigLIP"))
    if free:
        named["patch.weight"] = named["patch.weight"].unflatten(1, (shape.patch, shape.patch, -1)).movedim(3, 1)
    named["pool.probe"] = named["pool.probe"].flatten()
    vision = assemble(named, shape, *own, settings, bilinear=free)
    text = _text_tower(folder, config.text_config, _part(tensors, "text_model."), vision)
    same = Projection({"linear.weight": torch.eye(shape.width, dtype=vision.dtype, device=vision.device)})
    scale, bias = float(tensors["logit_scale"].double().exp()), float(tensors["logit_bias"])
    return joined(vision, text, same, scale, bias)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    known = ("vision_model.", "text_model.", "logit_scale", "logit_bias")
    unknown = [name for name in tensors if not name.startswith(known)]
    if unknown:
        raise BackboneError(f"the weights must be those of a SigLIP, got unknown tensors such as {unknown[0]!r}")
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in found.items() if not name.endswith("position_ids")}


def _vision_shape(config: Any, free: bool) -> ViTShape:
    check_channels(config)
    if not getattr(config, "vision_use_head", True):
        raise BackboneError(broken("vision_use_head in config.json", "be true", False))
    patch = side(config.patch_size, "patch_size")
    if free:
        grid = math.isqrt(whole(config, "num_patches"))
        if grid**2 != config.num_patches:
            raise BackboneError(broken("num_patches in config.json", "be a square number", config.num_patches))
        image_size = grid * patch
    else:
        image_size = side(config.image_size, "image_size")
    shape = ViTShape(
        width=whole(config, "hidden_size"),
        depth=whole(config, "num_hidden_layers", most=MOST_BLOCKS),
        heads=whole(config, "num_attention_heads"),
        mlp_width=whole(config, "intermediate_size"),
        patch=patch,
        image_size=image_size,
        norm_eps=number(config, "layer_norm_eps"),
        activation=activation(config),
        pooling="attention",
    )
    check_heads(shape.width, shape.heads)
    return shape


def _text_tower(folder: Path, config: Any, tensors: Mapping[str, Tensor], vision: ViT) -> PaddedTower:
    shape = TextShape(
        width=whole(config, "hidden_size"),
        depth=whole(config, "num_hidden_layers", most=MOST_BLOCKS),
        heads=whole(config, "num_attention_heads"),
        mlp_width=whole(config, "intermediate_size"),
        vocabulary=whole(config, "vocab_size"),
        positions=whole(config, "max_position_embeddings"),
        norm_eps=number(config, "layer_norm_eps"),
        activation=activation(config),
    )
    check_heads(shape.width, shape.heads)
    named = fused(renamed(tensors, _TEXT, CLIP_BLOCK, "a SigLIP"))
    if not {"head.weight", "head.bias"} <= named.keys():
        raise BackboneError("the weights must be those of a whole SigLIP, got no 'text_model.head.weight' and bias")
    placed = {name: tensor.detach().to(vision.device, vision.dtype).contiguous() for name, tensor in named.items()}
    head = Projection({f"linear.{part}": placed.pop(f"head.{part}") for part in ("weight", "bias")})
    check_tensors(placed, text_tensor_shapes(shape, outer_norm="norm"))
    words, end, pad = _tokenizer(folder)
    return PaddedTower(shape, placed, words, None, end, head, pad=pad)


def _tokenizer(folder: Path) -> tuple[Words, int, int]:
    """The tokenizer beside the weights, and the ids of its end and of its padding."""
    rule = f"the backbone folder {str(folder)!r} must hold its tokenizer as tokenizer.json and tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file():
        instead = "only spiece.model: save it with a tokenizer of transformers that has a fast version"
        raise BackboneError(f"{rule}, got {instead if (folder / 'spiece.model').is_file() else 'none'}")
    try:
        given = read_json(folder / "tokenizer_config.json")
        end, pad = (_token(given[f"{kind}_token"]) for kind in ("eos", "pad"))
        words = lower_case_words(folder / "tokenizer.json", without_punctuation=end == "</s>")
    except Exception as error:  # the tokenizer library raises nothing more special
        raise BackboneError(f"{rule}: {error!r}") from error
    ids = words.number(end), words.number(pad)
    if ids[0] is None or ids[1] is None:
        raise BackboneError(f"{rule}: it does not know the tokens {end!r} and {pad!r}")
    return words, ids[0], ids[1]


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)
