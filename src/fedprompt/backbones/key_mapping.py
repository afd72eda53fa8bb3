"""From the tensor names of a checkpoint to the canonical ones of `shape.py`.

Supported are the files of `transformers` (ViT, DeiT, DINO, DINOv2 and CLIP's vision tower, with either its published or
its in-memory names) and those of timm and the DINOv2 authors. Of a whole CLIP, the text tower, the projections and the
logit scale are skipped here. An unknown tensor is an error: an architecture with one more norm must not be taken for
one without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from fedprompt.errors import BackboneError

CLIP_BLOCK = {  # of `transformers`, for the text tower of CLIP and both towers of SigLIP
    r"layer_norm([12])\.(weight|bias)": r"norm\1.\2",
    r"self_attn\.q_proj\.(weight|bias)": r"query.\1",
    r"self_attn\.k_proj\.(weight|bias)": r"key.\1",
    r"self_attn\.v_proj\.(weight|bias)": r"value.\1",
    r"self_attn\.out_proj\.(weight|bias)": r"attention.out.\1",
    r"mlp\.fc1\.(weight|bias)": r"mlp.in.\1",
    r"mlp\.fc2\.(weight|bias)": r"mlp.out.\1",
}
_WRAPPER = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers|vision_model)\.")
_IGNORED = re.compile(
    r"^(classifier|cls_classifier|distillation_classifier|pooler|head|head_dist)\.|^(embeddings\.)?mask_token$"
    r"|^(text_model|text_projection|visual_projection)\.|^logit_scale$|^embeddings\.position_ids$"
)
_TOP = {
    r"(embeddings\.)?cls_token|embeddings\.class_embedding": "cls",
    r"embeddings\.distillation_token|dist_token": "distillation",
    r"(embeddings\.)?register_tokens|reg_token": "registers",
    r"embeddings\.position_embeddings|pos_embed|embeddings\.position_embedding\.weight": "positions",
    r"(embeddings\.(patch_embeddings\.projection|patch_embedding)|patch_embed\.proj)\.(weight|bias)": r"patch.\3",
    r"pre_layrnorm\.(weight|bias)": r"ln_pre.\1",
    r"(layernorm|post_layernorm|norm)\.(weight|bias)": r"norm.\2",
}
_IN_BLOCK = {
    r"(layernorm_before|layer_norm1|norm1)\.(weight|bias)": r"norm1.\2",
    r"(layernorm_after|layer_norm2|norm2)\.(weight|bias)": r"norm2.\2",
    r"attn\.qkv\.(weight|bias)": r"attention.in.\1",
    r"(attention\.attention\.query|(attention|self_attn)\.q_proj)\.(weight|bias)": r"query.\3",
    r"(attention\.attention\.key|(attention|self_attn)\.k_proj)\.(weight|bias)": r"key.\3",
    r"(attention\.attention\.value|(attention|self_attn)\.v_proj)\.(weight|bias)": r"value.\3",
    r"(attn\.proj|attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.(weight|bias)": r"attention.out.\2",
    r"(ls|layer_scale)([12])\.(gamma|lambda1)": r"scale\2",
    r"(intermediate\.dense|mlp\.fc1|mlp\.weights_in|mlp\.w12)\.(weight|bias)": r"mlp.in.\2",
    r"(output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.w3|mlp\.down_proj)\.(weight|bias)": r"mlp.out.\2",
    r"mlp\.gate_proj\.(weight|bias)": r"gate.\1",
    r"mlp\.up_proj\.(weight|bias)": r"up.\1",
}
_BLOCK = re.compile(r"^(?:encoder\.layers?|layers|blocks)\.(\d+)\.(.+)$")


def canonical(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and fuse; `cls`, `distillation`, `registers` and `positions` stay apart until a resolution is chosen."""
    kept = {_WRAPPER.sub("", name): tensor for name, tensor in state.items()}
    kept = {name: tensor for name, tensor in kept.items() if not _IGNORED.match(name)}
    return with_zero_biases(fused(renamed(kept, _TOP, _IN_BLOCK, "a ViT, DeiT, DINO, DINOv2 or CLIP")))


def renamed(
    state: Mapping[str, Tensor], top: Mapping[str, str], in_block: Mapping[str, str], family: str
) -> dict[str, Tensor]:
    """Every tensor under its canonical name, by two tables of patterns: for the names of the whole, and for those
    inside a block.
    """
    result = {}
    unknown = []
    for name, tensor in state.items():
        block = _BLOCK.match(name)
        inner = _first_match(name, top) if block is None else _first_match(block[2], in_block)
        if inner is None:
            unknown.append(name)
        else:
            result[inner if block is None else f"blocks.{block[1]}.{inner}"] = tensor
    if unknown:
        raise BackboneError(
            f"the weights must be those of {family}, got {len(unknown)} unknown tensors such as {unknown[0]!r}"
        )
    return result


def _first_match(name: str, table: Mapping[str, str]) -> str | None:
    for pattern, new in table.items():
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(new)
    return None


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value become one matrix; gate and value of a SwiGLU too."""
    result = dict(tensors)
    for parts, whole in ((("query", "key", "value"), "attention.in"), (("gate", "up"), "mlp.in")):
        for name in tensors:
            prefix, _, ending = name.rpartition(f".{parts[0]}.")
            names = [f"{prefix}.{part}.{ending}" for part in parts]
            if prefix and all(part in tensors for part in names):
                result[f"{prefix}.{whole}.{ending}"] = torch.cat([result.pop(part) for part in names])
    return result


def with_zero_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some checkpoints were trained without query, key and value biases or without one in the patch embedding."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("attention.in.weight", "patch.weight")):
            result.setdefault(name.removesuffix("weight") + "bias", tensor.new_zeros(len(tensor)))
    return result
