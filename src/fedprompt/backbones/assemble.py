"""From canonical tensors at the trained resolution to a frozen backbone at the chosen one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedprompt.backbones.position_embedding import chosen_size, interpolate
from fedprompt.backbones.rotary import rotation
from fedprompt.backbones.shape import ViTShape, tensor_shapes
from fedprompt.backbones.vit import ViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken

Triple = tuple[float, float, float]

# heads by width where all published models agree; others (1280 has 16 or 20) need a config.json
_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1536: 24}


def assemble(
    tensors: Mapping[str, Tensor],
    native: ViTShape,
    mean: Triple,
    std: Triple,
    config: BackboneConfig,
    bilinear: bool = False,
) -> ViT:
    """Check every tensor, interpolate positions, move to device and precision, freeze. `bilinear` positions are SigLIP 2's."""
    working = torch.float64 if config.dtype == "float64" else torch.float32
    tensors = {name: tensor.to(working) for name, tensor in tensors.items()}
    weights = {name: tensor for name, tensor in tensors.items() if name not in _LEADING}
    weights["lead"], weights["position"] = _leading(tensors, native)
    if native.rope_base is not None:
        weights["rotation"] = rotation(native)
    check_tensors(weights, tensor_shapes(native))
    if config.stem >= native.depth:
        raise BackboneError(broken("backbone.stem", f"be below the {native.depth} blocks of the backbone", config.stem))
    size = chosen_size(config.image_size, native.image_size, native.patch)
    shape = dataclasses.replace(native, image_size=size)
    antialias = "registers" in tensors or bilinear
    weights["position"] = interpolate(weights["position"], shape.grid, antialias, bilinear)
    if shape.rope_base is not None:
        weights["rotation"] = rotation(shape)
    device, dtype = compute_device(config.device), getattr(torch, config.dtype)
    weights = {name: tensor.detach().to(device, dtype).contiguous() for name, tensor in weights.items()}
    return ViT(config.name, shape, mean, std, weights, native_image_size=native.image_size, stem=config.stem)


_LEADING = ("cls", "distillation", "registers", "positions")


def infer_shape(tensors: Mapping[str, Tensor], norm_eps: float) -> ViTShape:
    """The architecture of a bare weight file, as far as its tensor shapes define it."""
    try:
        width, _, patch, _ = tensors["patch.weight"].shape
        hidden = tensors["blocks.0.mlp.out.weight"].shape[1]
        gated = tensors["blocks.0.mlp.in.weight"].shape[0] == 2 * hidden
        count = tensors["positions"].numel() // width
    except (KeyError, ValueError, IndexError) as error:
        raise BackboneError(
            f"the weight file must hold a vision transformer, but its tensors do not fit: {error}"
        ) from error
    if "ln_pre.weight" in tensors:
        raise BackboneError(
            "a bare CLIP weight file does not say its activation, quick_gelu or gelu: use a folder with a config.json"
        )
    if width not in _HEADS:
        raise BackboneError(
            f"a weight file of width {width} does not say its attention heads: use a folder with a config.json"
        )
    extra = _extra_tokens(tensors, width)
    grid = math.isqrt(count - _positioned(count, extra))
    return ViTShape(
        width=width,
        depth=len([name for name in tensors if name.endswith(".norm1.weight")]),
        heads=_HEADS[width],
        mlp_width=hidden,
        patch=patch,
        image_size=grid * patch,
        extra_tokens=extra,
        norm_eps=norm_eps,
        layer_scale="blocks.0.scale1" in tensors,
        mlp="swiglu" if gated else "plain",
    )


def _leading(tensors: Mapping[str, Tensor], native: ViTShape) -> tuple[Tensor, Tensor]:
    """CLS and extra tokens with the positions they have, and the positions of the patches."""
    missing = [name for name in ("cls", "positions")[not native.has_cls :] if name not in tensors]
    if missing:
        raise BackboneError(f"the weights must hold a CLS token and position embeddings, got no {missing[0]}")
    width = native.width
    if not native.has_cls:
        return tensors["positions"][:0], tensors["positions"]
    lead = torch.cat([tensors[name].reshape(-1, width) for name in _LEADING[:3] if name in tensors])
    positions = tensors["positions"].reshape(-1, width)
    own = _positioned(len(positions), native.extra_tokens)
    lead = torch.cat([lead[:own] + positions[:own], lead[own:]])
    return lead, positions[own:]


def _extra_tokens(tensors: Mapping[str, Tensor], width: int) -> int:
    return sum(tensors[name].numel() // width for name in ("distillation", "registers") if name in tensors)


def _positioned(count: int, extra: int) -> int:
    """How many leading tokens have a position: the rest must be a square grid of patches.

    Only CLS in most models, CLS and the distillation token in DeiT, none in timm's models with registers.
    """
    for own in (1 + extra, 1, 0):
        if 0 < count - own == math.isqrt(max(count - own, 0)) ** 2:
            return own
    raise BackboneError(f"position embeddings must cover a square grid of patches, got {count} of them")


def check_tensors(weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless these are exactly the expected tensors, and finite."""
    different = sorted(expected.keys() ^ weights.keys())
    if different:
        word = "lack" if different[0] in expected else "have an unexpected"
        raise BackboneError(
            f"the weights do not fit their architecture: they {word} {different[0]!r} ({len(different)} such)"
        )
    for name, size in expected.items():
        if tuple(weights[name].shape) != size:
            raise BackboneError(broken(f"weight {name!r}", f"have shape {size}", tuple(weights[name].shape)))
        if not bool(torch.isfinite(weights[name]).all()):
            raise BackboneError(
                f"weight {name!r} must be finite, got infinite values or not-a-number: the file is damaged"
            )


def compute_device(name: str, setting: str = "backbone.device") -> torch.device:
    """The device of that name, if this torch can use it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ValueError) as error:
        raise BackboneError(broken(setting, "be a device this torch can use", name)) from error
