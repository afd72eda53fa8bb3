"""Random vision transformers: built in milliseconds from a seed, with features that differ from image to image."""

from __future__ import annotations

import torch
from torch import Tensor

from fedprompt.backbones.catalog import TINY
from fedprompt.backbones.shape import ViTShape, tensor_shapes
from fedprompt.backbones.vit import ViT

TINY_SHAPE = ViTShape(width=32, depth=3, heads=2, mlp_width=64, patch=4, image_size=TINY.image_size)


def random_vit(
    shape: ViTShape = TINY_SHAPE, seed: int = 0, name: str = "tiny", dtype: torch.dtype = torch.float32
) -> ViT:
    """A frozen transformer of any shape with seeded random weights, at its native resolution."""
    weights = {key: tensor.to(dtype) for key, tensor in random_weights(shape, seed).items()}
    return ViT(name, shape, TINY.mean, TINY.std, weights, native_image_size=shape.image_size)


def random_weights(shape: ViTShape, seed: int) -> dict[str, Tensor]:
    """Weights so large that attention is not uniform and the MLP not linear: a wrong forward pass shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in tensor_shapes(shape).items():
        noise = torch.randn(size, generator=generator)
        around_one = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "scale1", "scale2"))
        fan_in = noise[0].numel() if noise.ndim > 1 and name not in ("lead", "position") else 0
        weights[name] = 1 + 0.1 * noise if around_one else noise * (fan_in**-0.5 if fan_in else 0.2)
    return weights
