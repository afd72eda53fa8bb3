"""A network that makes a text context of the names a client has to tell apart.

Learnable queries Q (m, d) attend once to the text features N (C, D) of the names. What they find goes through a gated
feed-forward layer with a residual:

    X = W_O Attention(q = W_Q LN(Q) + b_Q,  k = W_K LN(N) + b_K,  v = W_V LN(N) + b_V) + b_O      several heads, over the known names only
    P = X + W_2 (a * gelu(b)) + b_2,    (a, b) = W_1 LN(X) + b_1                                  4 d hidden units

There is no residual around the attention, so P depends on Q only through the attention's weights. With `residual` X = Q +
..., as in a usual transformer block. Nothing tells the names' order, so P does not depend on it, and there may be any number
of them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.modules.init import uniform
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

WIDENING = 4  # hidden units of the feed-forward layer for one of a token


def initial_generator(queries: Tensor, features: int, generator: Stream) -> Tensors:
    """Queries (m, d) as given, norms that scale by one; names have D features.

    The maps to queries, keys and values start as one matrix of torch's attention does, uniform in ±sqrt(6 / (3 d + fan-in)),
    with biases of zero; all other layers are uniform in ±1/sqrt(fan-in).
    """
    return {"queries": queries, **initial_network(queries.shape[-1], features, generator)}


def initial_network(width: int, features: int, generator: Stream) -> Tensors:
    """The same without queries, for those that `ask` is given (..., m, width)."""
    drawn = {
        name: _projection(f"attention.{name}", width, columns, generator)
        for name, columns in (("query", width), ("key", features), ("value", features))
    }
    return {
        **_norm("queries_norm", width),
        **_norm("names_norm", features),
        **drawn["query"],
        **drawn["key"],
        **drawn["value"],
        "attention.output.weight": uniform((width, width), width, generator),
        "attention.output.bias": torch.zeros(width),
        **_norm("feed_forward.norm", width),
        **_linear("feed_forward.in", 2 * WIDENING * width, width, generator),
        **_linear("feed_forward.out", width, WIDENING * width, generator),
    }


def generate(tensors: Tensors, names: Tensor, known: Tensor, heads: int, residual: bool = False) -> Tensor:
    """The context (m, d) for the names (C, D) of which `known` (C,) is not zero."""
    return ask(tensors, tensors["queries"], names, known, heads, residual)


def ask(
    tensors: Tensors, queries: Tensor, names: Tensor, known: Tensor | None, heads: int, residual: bool = False
) -> Tensor:
    """What given queries (..., m, d) make of the names (C, D)."""
    said = _normed(tensors, "names_norm", names)
    asked = _applied(tensors, "attention.query", _normed(tensors, "queries_norm", queries))
    key, value = (_applied(tensors, f"attention.{name}", said) for name in ("key", "value"))
    asked, key, value = (rows.unflatten(-1, (heads, -1)) for rows in (asked, key, value))  # (..., rows, h, d / h)
    scores = torch.einsum("...mhe,che->...hmc", asked, key) / math.sqrt(asked.shape[-1])
    weights = (scores if known is None else scores.masked_fill(known == 0, -math.inf)).softmax(-1)
    answer = torch.einsum("...hmc,che->...mhe", weights, value).flatten(-2)
    mixed = _applied(tensors, "attention.output", answer)
    if residual:
        mixed = queries + mixed
    hidden, gate = _applied(tensors, "feed_forward.in", _normed(tensors, "feed_forward.norm", mixed)).chunk(2, dim=-1)
    return mixed + _applied(tensors, "feed_forward.out", hidden * F.gelu(gate))


def _norm(name: str, width: int) -> Tensors:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def _projection(name: str, rows: int, columns: int, generator: Stream) -> Tensors:
    bound = math.sqrt(6 / (3 * rows + columns))
    return {
        f"{name}.weight": bound * (2 * generator.uniform(rows, columns) - 1),
        f"{name}.bias": torch.zeros(rows),
    }


def _linear(name: str, rows: int, columns: int, generator: Stream) -> Tensors:
    return {
        f"{name}.weight": uniform((rows, columns), columns, generator),
        f"{name}.bias": uniform((rows,), columns, generator),
    }


def _normed(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def _applied(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
