"""The few operations all towers are made of, on a flat dictionary of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[name + ".weight"], weights[name + ".bias"])


def norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], eps)


def split_heads(projected: Tensor, heads: int, parts: int) -> Tensor:
    """(B, R, parts * d) to (parts, B, heads, R, d / heads)."""
    batch, rows, width = projected.shape
    return projected.view(batch, rows, parts, heads, width // parts // heads).permute(2, 0, 3, 1, 4)


def activate(kind: str, hidden: Tensor) -> Tensor:
    """`gelu`, or CLIP's cheaper `quick_gelu`."""
    return F.gelu(hidden) if kind == "gelu" else hidden * torch.sigmoid(1.702 * hidden)


def update_digest(sha: _Hash, weights: Weights) -> None:
    """Add every byte of every weight, in the order of their names."""
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.view(torch.uint8).numpy().data)
