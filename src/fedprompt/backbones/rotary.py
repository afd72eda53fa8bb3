"""Rotary positions: queries and keys of patches are turned by angles of their place in the image (DINOv3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedprompt.backbones.shape import ViTShape

Turns = Sequence[Tensor | None]
"""One for each piece of a sequence: cosines and sines (2, R, d / h) of its rows, or None if they are not turned."""


def rotation(shape: ViTShape) -> Tensor:
    """Cosines and sines (2, T, d / h) of all rows of an image, in float32; those before the patches are not turned.

    A patch at (y, x), both from -1 to 1, has the angles 2 pi y / p and then 2 pi x / p, with d / 4h periods p from 1 to `rope_base`, and
    both halves of a head have the same angles. So another image size needs no interpolation.
    """
    assert shape.rope_base is not None
    place = (torch.arange(shape.grid, dtype=torch.float32) + 0.5) / shape.grid * 2 - 1
    where = torch.stack(torch.meshgrid(place, place, indexing="ij"), dim=-1).flatten(0, 1)  # (M, 2)
    periods = shape.rope_base ** torch.arange(0, 1, 4 * shape.heads / shape.width, dtype=torch.float32)
    angles = (2 * math.pi * where[:, :, None] / periods).flatten(1).tile(2)
    angles = torch.cat([angles.new_zeros(shape.lead, angles.shape[1]), angles])
    return torch.stack([angles.cos(), angles.sin()])


def joined(turns: Turns, pieces: Sequence[Tensor]) -> Tensor | None:
    """The turns of pieces (B, R, d) that stand together."""
    given = next((turn for turn in turns if turn is not None), None)
    if given is None:
        return None
    still = torch.stack([torch.ones_like(given[0, :1]), torch.zeros_like(given[0, :1])])
    parts = [
        still.expand(-1, piece.shape[1], -1) if turn is None else turn
        for turn, piece in zip(turns, pieces, strict=True)
    ]
    return torch.cat(parts, dim=1)


def turned(rows: Tensor, turn: Tensor | None) -> Tensor:
    """Queries or keys (B, h, R, d / h) after the rotation."""
    if turn is None:
        return rows
    first, second = rows.chunk(2, dim=-1)
    return (rows * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]).to(rows.dtype)
