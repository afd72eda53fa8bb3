"""One pre-norm block over pieces of a sequence: a pure function, so that all blocks can share one compiled graph.

At each block a row is either *live* (its output is used) or *passive* (it is only a key and a value).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.layers import Weights
from fedprompt.backbones.rotary import Turns, joined, turned
from fedprompt.backbones.shape import ViTShape
from fedprompt.modules.insertion import spread, together

Block = Callable[[Weights, ViTShape, Sequence[Tensor], Sequence[Tensor], Turns], list[Tensor]]


def run_block(
    weights: Weights, shape: ViTShape, live: Sequence[Tensor], passive: Sequence[Tensor], turns: Turns = ()
) -> list[Tensor]:
    """The live pieces (B, R, d) after the block with these weights. Pieces may be shared by runs of samples (`spread`):
    what depends on them alone is computed once for a run. `turns` belong to the live and then the passive pieces; there
    are none without rotary positions.
    """
    turns = turns or [None] * (len(live) + len(passive))
    own = joined(turns[: len(live)], live)
    some = [(rows, turn) for rows, turn in zip(passive, turns[len(live) :], strict=True) if rows.shape[1]]
    passive, turns = [rows for rows, _ in some], [turn for _, turn in some]
    own_scale = layers.by_image(weights)
    x = torch.cat(together(live), dim=1) if len(live) > 1 else live[0]
    if own_scale:
        passive = [spread(piece, max(len(piece), len(x))) for piece in passive]
    rows = x.shape[1]
    total = rows + sum(piece.shape[1] for piece in passive)
    few = rows * ((shape.heads - 1) * total + shape.width) < shape.width * total  # by the products that each way costs
    few = few and shape.rope_base is None and not own_scale  # such keys have no common matrix
    mixed = _few_look(weights, shape, x, passive) if few else _many_look(weights, shape, x, passive, own, turns)
    given = x = spread(x, len(mixed))
    x = x + _scaled(weights, shape, "scale1", layers.linear(weights, "attention.out", mixed))
    hidden = layers.linear(weights, "mlp.in", layers.norm(weights, "norm2", x, shape.norm_eps))
    x = x + _scaled(weights, shape, "scale2", layers.linear(weights, "mlp.out", _activate(shape, hidden)))
    x = layers.with_adapter(weights, x, lambda: layers.norm(weights, "norm1", given, shape.norm_eps))
    return list(x.split([piece.shape[1] for piece in live], dim=1)) if len(live) > 1 else [x]


@torch.no_grad()
def cls_attention(weights: Weights, shape: ViTShape, pieces: Sequence[Tensor], turns: Turns = ()) -> Tensor:
    """The shares (B, pieces) of the attention of CLS, the first row of the first piece; means over the heads. Without a CLS
    row it is the attention of the image's own rows, the first piece. `turns` as in `run_block`.
    """
    rows = torch.cat(together(pieces), dim=1)
    own = joined(turns, pieces)
    normed = layers.norm(weights, "norm1", rows, shape.norm_eps)
    asking = 1 if shape.has_cls else pieces[0].shape[1]
    to_query, to_key = weights["attention.in.weight"][: 2 * shape.width].chunk(2)
    query_bias, key_bias = weights["attention.in.bias"][: 2 * shape.width].chunk(2)
    queries, keys = slice(shape.width), slice(shape.width, 2 * shape.width)
    query = layers.scaled(weights, "attention.in", F.linear(normed[:, :asking], to_query, query_bias), queries)
    key = layers.scaled(weights, "attention.in", F.linear(normed, to_key, key_bias), keys)
    query, key = (rows.unflatten(-1, (shape.heads, -1)).transpose(1, 2) for rows in (query, key))
    query, key = turned(query, None if own is None else own[:, :asking]), turned(key, own)
    looks = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1).mean((1, 2))  # (B, rows)
    return torch.stack([look.sum(-1) for look in looks.split([piece.shape[1] for piece in pieces], dim=-1)], dim=-1)


def _many_look(
    weights: Weights,
    shape: ViTShape,
    x: Tensor,
    passive: Sequence[Tensor],
    own: Tensor | None = None,
    turns: Turns = (),
) -> Tensor:
    """Attention (B, R, d) of the live rows. Passive rows get a key and a value, but no query."""
    weight, bias = weights["attention.in.weight"], weights["attention.in.bias"]
    normed = layers.norm(weights, "norm1", x, shape.norm_eps)
    projected = layers.scaled(weights, "attention.in", F.linear(normed, weight, bias))
    query, key, value = layers.split_heads(projected, shape.heads, 3)
    pairs = [(turned(key, own), value)]
    for rows, turn in zip(passive, turns or [None] * len(passive), strict=True):
        normed = layers.norm(weights, "norm1", rows, shape.norm_eps)
        projected = F.linear(normed, weight[shape.width :], bias[shape.width :])
        projected = layers.scaled(weights, "attention.in", projected, slice(shape.width, None))
        key, value = layers.split_heads(projected, shape.heads, 2)
        pairs.append((turned(key, turn), value))
    key, value = (torch.cat(together(parts), dim=2) if passive else parts[0] for parts in zip(*pairs, strict=True))
    query = spread(turned(query, own), len(key))
    return layers.attention(query, key, value).transpose(1, 2).flatten(2)


def _few_look(weights: Weights, shape: ViTShape, x: Tensor, passive: Sequence[Tensor]) -> Tensor:
    """The same for few live rows: the normed rows n are used directly, and keys and values are never computed.

    A score is q'(K n + k) = (K'q)'n + q'k, where q'k is the same for all rows and cancels in the softmax; and with
    weights a that sum to 1, the sum of a (V n + v) is V (the sum of a n) + v.
    """
    parts = [layers.norm(weights, "norm1", rows, shape.norm_eps) for rows in (x, *passive)]
    normed = torch.cat(together(parts), dim=1)
    to_query, to_key, to_value = weights["attention.in.weight"].unflatten(0, (3, shape.heads, -1))  # (h, d / h, d)
    query_bias, _, value_bias = weights["attention.in.bias"].chunk(3)
    query = F.linear(parts[0], to_query.flatten(0, 1), query_bias).unflatten(-1, (shape.heads, -1))
    asked = spread(torch.einsum("brhc,hcd->bhrd", query, to_key), len(normed))
    seen = normed.unsqueeze(1)
    mixed = layers.attention(asked.flatten(1, 2).unsqueeze(1), seen, seen, scale=query.shape[-1] ** -0.5)
    mixed = mixed.squeeze(1).unflatten(1, asked.shape[1:3])  # (B, h, R, d)
    return torch.einsum("bhrd,hcd->brhc", mixed, to_value).flatten(2) + value_bias


def _activate(shape: ViTShape, hidden: Tensor) -> Tensor:
    if shape.mlp == "swiglu":
        gate, value = hidden.chunk(2, dim=-1)
        return F.silu(gate) * value
    return layers.activate(shape.activation, hidden)


def _scaled(weights: Weights, shape: ViTShape, name: str, x: Tensor) -> Tensor:
    return x * weights[name] if shape.layer_scale else x
