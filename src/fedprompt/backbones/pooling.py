"""Attention pooling: a learned probe asks all rows of an image, in place of a CLS row (SigLIP)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.layers import Weights
from fedprompt.backbones.shape import ViTShape


def pooled(weights: Weights, shape: ViTShape, rows: Tensor) -> Tensor:
    """One vector (B, d) of the normed rows (B, R, d) of an image."""
    weight, bias = weights["pool.attention.in.weight"], weights["pool.attention.in.bias"]
    own, other = shape.width, slice(shape.width, None)
    probe = F.linear(weights["pool.probe"], weight[:own], bias[:own])
    query = probe.unflatten(0, (shape.heads, 1, -1)).expand(len(rows), -1, -1, -1)
    key, value = layers.split_heads(F.linear(rows, weight[other], bias[other]), shape.heads, 2)
    return _finished(weights, shape, layers.attention(query, key, value).flatten(1))


def pooled_alone(weights: Weights, shape: ViTShape, rows: Tensor) -> Tensor:
    """What every row (B, R, d) would give as the only row of its image: all attention is on it."""
    weight, bias = weights["pool.attention.in.weight"], weights["pool.attention.in.bias"]
    return _finished(weights, shape, F.linear(rows, weight[2 * shape.width :], bias[2 * shape.width :]))


def _finished(weights: Weights, shape: ViTShape, mixed: Tensor) -> Tensor:
    x = layers.linear(weights, "pool.attention.out", mixed)
    hidden = layers.linear(weights, "pool.mlp.in", layers.norm(weights, "pool.norm", x, shape.norm_eps))
    return x + layers.linear(weights, "pool.mlp.out", layers.activate(shape.activation, hidden))
