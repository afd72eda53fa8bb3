"""One prompt made of two: a global prompt G (..., g, d) and a local prompt L (..., l, d), fused to F (..., m, d).

Kinds without parameters:

    mean   F = (G + L) / 2        sum   F = G + L        concat   F = [G ; L], token behind token

`attention` is a pre-norm multi-head cross-attention with a residual,

    A(X, Y) = W_o concat_h( softmax(q_h k_h^T / sqrt(e)) v_h ) + b_o,    q = W_q N(X) + b_q,  k = W_k N(Y) + b_k,  v = W_v N(Y) + b_v

with e = d / heads and N the normalisation of a token to mean 0 and variance 1. N has no scale and shift of its own: the
maps behind it can learn both. So there are 4 (d^2 + d) numbers. W_q, W_k and W_v start at Xavier's uniform scale, all
biases at zero. W_o starts at zero, and with it A (`zero`), or at Xavier's scale too (`random`): A then has entries of
order 1, fifty times those of a prompt at 0.02, so the fused prompt is at first almost only a random map of the prompt that
is asked. Who asks whom:

| direction | F | tokens | at the start |
|---|---|---|---|
| `local_queries`  | L + A(L, G)               | l          | L |
| `global_queries` | G + A(G, L)               | g          | G |
| `bidirectional`  | L + A(L, G) + G + A(G, L) | l, must be g | L + G |
| `concat_keys`    | L + A(L, [G ; L])         | l          | L |

The same A serves both ways of `bidirectional`, and every block or class of the leading axes. Tokens carry no position
in it, so the order of the tokens that are asked cannot be seen. b_k adds the same to all scores of a query and never
gets a gradient; it is kept because the standard layer has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

Kind = Literal["attention", "mean", "sum", "concat"]
Direction = Literal["local_queries", "global_queries", "bidirectional", "concat_keys"]

Start = Literal["zero", "random"]  # of the output map

MAPS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Answer:
    """What a cross-attention says: its output (..., m, d), and who listened to whom (..., heads, m, n)."""

    tokens: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Fused:
    """A fused prompt and its parts: F is the residual plus the answers."""

    residual: Tensor
    answers: tuple[Answer, ...]

    @property
    def attention(self) -> Tensor:
        """What all answers add to the residual, (..., m, d)."""
        return torch.stack([answer.tokens for answer in self.answers]).sum(0)

    @property
    def tokens(self) -> Tensor:
        return self.residual + self.attention


def new_attention(width: int, generator: Stream, start: Start = "zero") -> Tensors:
    """The tensors of one cross-attention; with start `zero` it adds nothing until its output map is trained."""
    weights = {name: torch.zeros(width, width) for name in MAPS}
    for name in MAPS if start == "random" else MAPS[:-1]:
        weights[name] = (generator.uniform(width, width) * 2 - 1) * (3 / width) ** 0.5
    biases = {f"{name}.bias": torch.zeros(width) for name in MAPS}
    return {**{f"{name}.weight": weight for name, weight in weights.items()}, **biases}


def cross_attend(weights: Tensors, queries: Tensor, asked: Tensor, heads: int) -> Answer:
    """A(queries, asked) for queries (..., m, d) and asked (..., n, d)."""
    asking, asked = (F.layer_norm(tokens, tokens.shape[-1:]) for tokens in (queries, asked))
    parts = (heads, -1)
    query = _mapped(weights, "query", asking).unflatten(-1, parts)  # (..., m, h, e)
    key, value = (_mapped(weights, name, asked).unflatten(-1, parts) for name in ("key", "value"))  # (..., n, h, e)
    scores = torch.einsum("...mhe,...nhe->...hmn", query, key) / query.shape[-1] ** 0.5
    listened = scores.softmax(-1)
    mixed = torch.einsum("...hmn,...nhe->...mhe", listened, value).flatten(-2)
    return Answer(_mapped(weights, "output", mixed), listened)


def fuse_by_attention(
    direction: Direction, weights: Tensors, global_prompt: Tensor, local_prompt: Tensor, heads: int
) -> Fused:
    """The fused prompt with its parts, which the diagnostics want to see."""
    if direction == "global_queries":
        return Fused(global_prompt, (cross_attend(weights, global_prompt, local_prompt, heads),))
    if direction == "concat_keys":
        both = torch.cat([global_prompt, local_prompt], dim=-2)
        return Fused(local_prompt, (cross_attend(weights, local_prompt, both, heads),))
    from_global = cross_attend(weights, local_prompt, global_prompt, heads)
    if direction == "local_queries":
        return Fused(local_prompt, (from_global,))
    from_local = cross_attend(weights, global_prompt, local_prompt, heads)
    return Fused(local_prompt + global_prompt, (from_global, from_local))


def fuse_plainly(kind: Kind, global_prompt: Tensor, local_prompt: Tensor) -> Tensor:
    """The kinds that have no parameters."""
    if kind == "concat":
        return torch.cat([global_prompt, local_prompt], dim=-2)
    total = global_prompt + local_prompt
    return total / 2 if kind == "mean" else total


def needs_equal_lengths(kind: Kind, direction: Direction) -> bool:
    """Whether tokens of the two prompts are added to each other."""
    return kind in ("mean", "sum") or (kind == "attention" and direction == "bidirectional")


def describe_attention(direction: Direction, fused: Fused, global_prompt: Tensor, local_prompt: Tensor) -> Tensors:
    """Where a fused prompt comes from, and whether the attention has collapsed; every number lies in [0, 1].

    attention_share    |A| / (|A| + |residual|) in Frobenius norms: 0 means that the fusion does nothing
    global_share       the part that comes from the global prompt. `local_queries`: attention_share; `global_queries`: its rest to one;
                       `bidirectional`: |G + A(L, G)| against |L + A(G, L)|; `concat_keys`: attention_share * global_mass
    global_mass        `concat_keys` only: attention on tokens of G, the rest being on tokens of L
    attention_entropy  of a query's attention over the n tokens it asks, divided by log n: near 0 each query hears one token alone
    attention_peak     the attention that the most heard token gets of all queries together: near 1 all hear the same one, 1 / n is even
    """
    share = part(fused.attention, fused.residual)
    found = {"attention_share": share, "global_share": share}
    if direction == "global_queries":
        found["global_share"] = 1 - share
    elif direction == "bidirectional":
        from_global, from_local = (answer.tokens for answer in fused.answers)
        found["global_share"] = part(global_prompt + from_global, local_prompt + from_local)
    elif direction == "concat_keys":
        found["global_mass"] = fused.answers[0].weights[..., : global_prompt.shape[-2]].sum(-1).mean()
        found["global_share"] = share * found["global_mass"]
    found["attention_entropy"] = torch.stack([_entropy(answer.weights) for answer in fused.answers]).mean()
    peaks = [answer.weights.mean((-3, -2)).amax(-1).mean() for answer in fused.answers]
    return {**found, "attention_peak": torch.stack(peaks).mean()}


def part(one: Tensor, other: Tensor) -> Tensor:
    """|one| / (|one| + |other|); 0 where both are zero."""
    return one.norm() / (one.norm() + other.norm()).clamp_min(torch.finfo(one.dtype).tiny)


def _mapped(weights: Tensors, name: str, tokens: Tensor) -> Tensor:
    return F.linear(tokens, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _entropy(weights: Tensor) -> Tensor:
    """Mean entropy of rows that sum to one, as a share of the greatest possible; a single token is heard evenly."""
    if weights.shape[-1] == 1:
        return torch.ones_like(weights).mean()
    return torch.special.entr(weights).sum(-1).mean() / math.log(weights.shape[-1])
