"""One post-norm block (BERT) over pieces of a sequence, as `block.py` is one pre-norm block.

A sentence shorter than the longest one is padded with rows of zeros. A row of a sentence is padding if all its numbers are 0;
it gets no attention, and it is a row of zeros again after the block. Prompt rows are never padding, whatever their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.layers import Weights
from fedprompt.backbones.shape import ViTShape
from fedprompt.modules.insertion import together


def words(rows: Tensor) -> Tensor:
    """Which rows (B, R, d) are words and not padding, (B, R)."""
    return (rows != 0).any(-1)


def run_post_norm_block(
    weights: Weights, shape: ViTShape, live: Sequence[Tensor], passive: Sequence[Tensor], own: Sequence[bool]
) -> list[Tensor]:
    """The live pieces (B, R, d) after the block. `own` says of each piece, live ones first, whether it is of the sentence."""
    pieces = together([*live, *passive])
    live = pieces[: len(live)]
    real = torch.cat([_real(rows, mine) for rows, mine in zip(pieces, own, strict=True)], dim=1)
    x = torch.cat(list(live), dim=1)
    mixed = _attention(weights, shape, x, torch.cat(pieces, dim=1), real)
    given = x
    x = layers.norm(weights, "norm1", x + layers.linear(weights, "attention.out", mixed), shape.norm_eps)
    hidden = layers.activate(shape.activation, layers.linear(weights, "mlp.in", x))
    output = layers.with_adapter(weights, x + layers.linear(weights, "mlp.out", hidden), lambda: given)
    x = layers.norm(weights, "norm2", output, shape.norm_eps)
    x = x * real[:, : x.shape[1], None]
    return list(x.split([piece.shape[1] for piece in live], dim=1))


@torch.no_grad()
def sentence_attention(weights: Weights, shape: ViTShape, pieces: Sequence[Tensor], own: Sequence[bool]) -> Tensor:
    """The shares (B, pieces) of the attention of the sentence, the first piece; means over its words and the heads. With a
    CLS row, of that row.
    """
    pieces = together(pieces)
    real = torch.cat([_real(rows, mine) for rows, mine in zip(pieces, own, strict=True)], dim=1)
    rows = torch.cat(pieces, dim=1)
    query, key = _projected(weights, shape, rows, 0), _projected(weights, shape, rows, 1)
    asking = 1 if shape.has_cls else pieces[0].shape[1]
    scores = query[:, :, :asking] @ key.mT * query.shape[-1] ** -0.5
    looks = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1).mean(1)  # (B, asking, rows)
    weight = real[:, :asking, None].to(looks)
    shares = (looks * weight).sum(1) / weight.sum(1)
    return torch.stack([part.sum(-1) for part in shares.split([piece.shape[1] for piece in pieces], dim=-1)], dim=-1)


def _real(rows: Tensor, own: bool) -> Tensor:
    return words(rows) if own else rows.new_ones(rows.shape[:2], dtype=torch.bool)


def _attention(weights: Weights, shape: ViTShape, x: Tensor, everybody: Tensor, real: Tensor) -> Tensor:
    query = _projected(weights, shape, x, 0)
    key, value = _projected(weights, shape, everybody, 1), _projected(weights, shape, everybody, 2)
    mixed = layers.attention(query, key, value, mask=real[:, None, None])
    return mixed.transpose(1, 2).flatten(2)


def _projected(weights: Weights, shape: ViTShape, rows: Tensor, part: int) -> Tensor:
    """Queries (0), keys (1) or values (2) of some rows, (B, heads, R, d / heads)."""
    own = slice(part * shape.width, (part + 1) * shape.width)
    projected = F.linear(rows, weights["attention.in.weight"][own], weights["attention.in.bias"][own])
    projected = layers.scaled(weights, "attention.in", projected, own)
    return projected.unflatten(-1, (shape.heads, -1)).transpose(1, 2)
