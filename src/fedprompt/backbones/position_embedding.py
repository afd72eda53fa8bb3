"""Position embeddings for a resolution other than the one they were trained at."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.errors import BackboneError, broken


def chosen_size(image_size: int | None, native: int, patch: int) -> int:
    """The side in pixels to run at: the configured one if it is a whole number of patches, else the native one."""
    size = native if image_size is None else image_size
    if size % patch:
        raise BackboneError(broken("backbone.image_size", f"be a multiple of the patch side {patch}", size))
    return size


def interpolate(positions: Tensor, grid: int, antialias: bool, bilinear: bool = False) -> Tensor:
    """Resample (M, d) patch positions bicubically (or linearly) to (grid * grid, d); untouched at their own grid.

    Always in float32, as `transformers` does: bicubic weights in half precision shift the embeddings. `antialias`
    differs by family (`transformers` uses it for DINOv2 with registers and for SigLIP 2 only), and each is right only for its own
    checkpoints.
    """
    side = math.isqrt(len(positions))
    if side == grid:
        return positions
    image = positions.to(torch.float32).view(1, side, side, -1).permute(0, 3, 1, 2)
    image = F.interpolate(
        image, size=(grid, grid), mode="bilinear" if bilinear else "bicubic", align_corners=False, antialias=antialias
    )
    return image.permute(0, 2, 3, 1).reshape(grid * grid, -1).to(positions.dtype)
