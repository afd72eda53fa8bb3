"""A network that makes a text context of the names a client has to tell apart.

Learnable queries Q (m, d) ask the text features N (C, D) of the names, once, and go through a gated feed-forward layer, both with a norm
before and a residual around:

    X = Q + W_O Attention(q = W_Q LN(Q),  k = W_K LN(N),  v = W_V LN(N)) + b_O        several heads, over the known names only
    P = X + W_2 (a * gelu(b)) + b_2,    (a, b) = W_1 LN(X) + b_1                      4 d hidden units

Nothing tells the names' order, so P does not depend on it, and there may be any number of them.
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
    """Queries (m, d) as given, linear layers uniform in ±1/sqrt(fan-in), norms that scale by one. Names have D features."""
    width = queries.shape[-1]
    return {
        "queries": queries,
        **_norm("queries_norm", width),
        **_norm("names_norm", features),
        "attention.query.weight": uniform((width, width), width, generator),
        "attention.key.weight": uniform((width, features), features, generator),
        "attention.value.weight": uniform((width, features), features, generator),
        **_linear("attention.output", width, width, generator),
        **_norm("feed_forward.norm", width),
        **_linear("feed_forward.in", 2 * WIDENING * width, width, generator),
        **_linear("feed_forward.out", width, WIDENING * width, generator),
    }


def generate(tensors: Tensors, names: Tensor, known: Tensor, heads: int) -> Tensor:
    """The context (m, d) for the names (C, D) of which `known` (C,) is not zero."""
    queries, said = tensors["queries"], _normed(tensors, "names_norm", names)
    asked = F.linear(_normed(tensors, "queries_norm", queries), tensors["attention.query.weight"])
    key, value = (F.linear(said, tensors[f"attention.{name}.weight"]) for name in ("key", "value"))
    asked, key, value = (rows.unflatten(-1, (heads, -1)) for rows in (asked, key, value))  # (rows, h, d / h)
    scores = torch.einsum("mhe,che->hmc", asked, key) / math.sqrt(asked.shape[-1])
    weights = scores.masked_fill(known == 0, -math.inf).softmax(-1)
    answer = torch.einsum("hmc,che->mhe", weights, value).flatten(-2)
    mixed = queries + _applied(tensors, "attention.output", answer)
    hidden, gate = _applied(tensors, "feed_forward.in", _normed(tensors, "feed_forward.norm", mixed)).chunk(2, dim=-1)
    return mixed + _applied(tensors, "feed_forward.out", hidden * F.gelu(gate))


def _norm(name: str, width: int) -> Tensors:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def _linear(name: str, rows: int, columns: int, generator: Stream) -> Tensors:
    return {
        f"{name}.weight": uniform((rows, columns), columns, generator),
        f"{name}.bias": uniform((rows,), columns, generator),
    }


def _normed(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def _applied(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
