"""FedPHA (ICML 2025): a global context of one length for all, and distant local ones of any length.

With the text features t_G of the global context G, t_L of the local one L, and t_Q of L Q, L after a projection:

    loss = CE(t_L) + CE(t_G) + mean (t_L - t_Q)^2 + mean_c relu(alpha - ||t_L,c - t_G,c||)
    Q    = V_2 V_2^T,   V_2 the right-singular vectors of G from number int(r (1 - ratio)) on, r of them in all

Predictions use only the local context. G is averaged, L stays; a client that never took part predicts with G.

- G is trained too, so Q is computed again in every step, and t_Q has a gradient with respect to L and, through the
  singular vectors, to G, as in the authors' code. With lambda = s^2 and A = G^T G, the derivative of Q is

      dQ = sum over kept i and others j of (v_i v_j^T + v_j v_i^T) (v_i^T dA v_j) / (lambda_i - lambda_j)

  where j also runs over the directions that G does not span (lambda_j = 0). It needs no derivative of single singular
  vectors, which is infinite where two kept singular values are equal or one is zero.
- The singular value decomposition is a thin one: r = min(m, d). So Q keeps the weaker directions *of what G spans* and
  drops everything outside. It is not the null-space projector its authors call it, and with m = 4 and ratio 0.8, their
  numbers for short contexts, it drops nothing of G; with their default m = 16 it drops 3 of 16 directions.
- int(r (1 - ratio)) is rounded down from the decimal number: r = 10 and ratio 0.8 leave out 2 directions, where the
  floating-point expression gives 1. Directions outside the span of G (it has a lower rank if words occur twice) are
  left out as well: they would depend on the linear algebra library.
- The mean of squares runs over classes and dimensions, so this term is small, at most 4 / D.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_local import WithLocalContext
from fedprompt.methods.bases.with_text import check_room, similarity
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

SAME = 1e-3  # distance of unit vectors that may be rounding alone, as both contexts can begin as the same words

Length = Annotated[int, Field(ge=1)]


@register("fedpha")
@dataclass(frozen=True)
class FedPHA(WithLocalContext):
    """A global context, and local ones of any length."""

    local_tokens: Length | Annotated[tuple[Length, ...], Field(min_length=1)] | None = None
    """Words of the local contexts: one number, or a list that clients use in turn; null for m. They begin at random."""
    kept_ratio: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the global context's directions that is kept, the weaker ones."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Alpha, distance to keep between local and global features."""
    pull_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Weight of the term that pulls t_L towards t_Q."""
    push_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Weight of the term that keeps t_L and t_G apart."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.context_words and self.local_tokens is not None:
            raise ConfigError(
                broken("method.local_tokens", "be null with context_words, which say the length", self.local_tokens)
            )
        if self.local_tokens is not None:
            check_room(world, "local_tokens", max(self.lengths))

    def own(self, world: World, context: Tensor, generator: Stream) -> Tensors:
        longest = max(self.lengths, default=self.context_tokens)
        return {"local_context": replace(self, context_tokens=longest).new_context(world, generator)}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the local contexts, used by the clients in turn; empty for that of the global one."""
        if isinstance(self.local_tokens, tuple):
            return self.local_tokens
        return () if self.local_tokens is None else (self.local_tokens,)

    def enrol(self, world: World, client: Client) -> Tensors:
        """A client begins with the first words of the declared context, up to its own length."""
        if len(self.lengths) < 2:
            return {}
        length = self.lengths[client.index % len(self.lengths)]
        return {"local_context": world.roles.local["local_context"][..., :length, :]}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        said = {"local_context": params["local_context"]}
        if batch.training:
            said["context"] = params["context"]
            said["projected"] = params["local_context"] @ projector(params["context"], self.kept_ratio)
        return Prompts(text={name: self.as_context(tokens) for name, tokens in said.items()})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["local_context"])

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        shared, own, projected = (seen.text[name] for name in ("context", "local_context", "projected"))
        plain = super().loss(world, params, logits, seen, batch, noise)
        of_global = super().loss(world, params, similarity(world, seen.image, shared), seen, batch, noise)
        push = F.relu(self.margin - distance(own, shared)).mean()
        return plain + of_global + self.pull_weight * F.mse_loss(own, projected) + self.push_weight * push


def distance(own: Tensor, shared: Tensor) -> Tensor:
    """||own - shared|| over the last axis, without a gradient where the two are the same but for rounding."""
    found = torch.linalg.vector_norm(own - shared, dim=-1)
    return torch.where(found > SAME, found, found.detach())


def projector(context: Tensor, kept_ratio: float) -> Tensor:
    """Q (..., d, d) of a context (..., m, d), with its derivative with respect to the context.

    In float64: in float32 the singular vectors of a context with two nearly equal words are off by 1e-3.
    """
    precise = context.double()
    with torch.no_grad():
        strong, weak = directions(precise, kept_ratio)  # (..., d, r), zero columns for directions that are not there
        spanned = torch.cat([strong, weak], dim=-1)
        energy = [(precise @ basis).square().sum(-2) for basis in (strong, weak)]
        inverse = energy[1].clamp_min(torch.finfo(precise.dtype).tiny).reciprocal() * (energy[1] > 0)
        gap = energy[1].unsqueeze(-1) - energy[0].unsqueeze(-2)
        gap_inverse = torch.where(gap < 0, 1 / gap.clamp_max(-torch.finfo(precise.dtype).tiny), 0.0)
    products = (precise @ weak).mT @ precise  # V_2^T A, (..., r, d)
    to_strong = (products @ strong) * gap_inverse @ strong.mT
    outside = (products - products @ spanned @ spanned.mT) * inverse.unsqueeze(-1)
    change = weak @ (to_strong + outside)  # zero but for rounding; what counts is its derivative
    change = change - change.detach()
    return (weak @ weak.mT + change + change.mT).to(context.dtype)


@torch.no_grad()
def directions(context: Tensor, kept_ratio: float) -> tuple[Tensor, Tensor]:
    """Orthonormal columns, or zeros, of the stronger directions that a context (..., m, d) spans, and of the weaker ones
    that are kept.
    """
    strengths: Tensor
    rows: Tensor
    _, strengths, rows = torch.linalg.svd(context, full_matrices=False)
    dropped = int(strengths.shape[-1] * (1 - kept_ratio) + 1e-9)
    nothing = strengths[..., :1] * max(context.shape[-2:]) * torch.finfo(context.dtype).eps
    spanned = (rows * (strengths > nothing).unsqueeze(-1)).mT
    return spanned[..., :dropped], spanned[..., dropped:]
