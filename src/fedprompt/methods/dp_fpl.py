"""DP-FPL (Tran et al., ICLR 2025): a global and a local context, whose gradients are cut and made noisy; the local one is
factorised at low rank, so that less noise is needed, and its residual is kept.

    P = G + L,   L = U V + R exactly,   U (m, r), V (r, d) from one power iteration on L,   R = L - U V
    U <- orthonormal columns of L Omega,   V <- orthonormal rows of U^T L,   Omega (d, r) random, in every step

    g_G <- cut(g) + N(0, s^2 / K),   g_U <- cut(g V^T) + N(0, s^2),   g_V <- cut(U^T g) + N(0, s^2)
    g_L <- g_U V + U g_V - U U^T g_U V,          cut(g) = g min(1, C / ||g||)
    s = C sqrt(T ln(1 / delta)) / (epsilon B)

g is the gradient of the context, K the clients, T the rounds, B the images of the batch. G is averaged with equal
weights, L stays. U and V carry no value of their own: only the gradient of L passes through them. At full rank and without
noise the gradient of L is g: the sum of two contexts. A client that never took part predicts with G.

The paper's server adds N(0, s^2 / K^2) to the mean gradient of each step. Here clients take several steps in a round, and
every client adds its part, N(0, s^2 / K): the mean of K of those has the same distribution.

**This is the paper's noise, not a guarantee.** s takes the sensitivity of a cut batch gradient as C / B. But the gradient
of the batch is cut, not that of each image: replacing one image can change it by up to 2 C (there is a test that does).
T counts rounds, while every step adds to what is spent. And the noise follows from the seed, so a server that knows the seed
can take it off. For a guarantee use `privacy`.

The paper's code adds U U^T g_U V where Yu et al. (ICML 2021), whose method it is, subtract it; with a plus the gradient at
full rank is not g. It divides g_U and g_V by ten, which is a rate. It lets a client step with the factors of another; ours
never leave their client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_local import WithLocal
from fedprompt.methods.bases.with_text import similarity
from fedprompt.modules.contexts import STANDARD_DEVIATION
from fedprompt.modules.gradient_rules import clipped_and_noisy, low_rank_and_noisy
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("dp_fpl")
@dataclass(frozen=True)
class DPFPL(WithLocal):
    """A global and a low-rank local context that are trained with noisy gradients."""

    rank: Annotated[int, Field(ge=1)] = 2
    """r, rank of the local context's gradient; at most the words of the context. The paper has 8 of 16 words."""
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The paper's epsilon, 0.1 to 0.4 there; null for gradients that are neither cut nor noisy."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The paper's delta."""
    bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """C, largest length of a gradient."""

    @property
    def weighs_evenly(self) -> bool:
        return True

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.class_specific:
            raise ConfigError(broken("method.class_specific", "be false: one context is factorised", True))
        if self.rank > self.context_length(world):
            rule = f"be at most the {self.context_length(world)} words of the context"
            raise ConfigError(broken("method.rank", rule, self.rank))

    def own(self, world: World, context: Tensor, generator: Stream) -> Tensors:
        """Random, and as small as a random context: G and L get the same gradient at full rank, and may not be equal."""
        drawn = STANDARD_DEVIATION * generator.normal(*context.shape)
        return world.placed({"local_context": drawn})

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        return {"local_context": torch.zeros_like(local["local_context"])}

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        if not training:
            return {}
        tokens, width = self.context_length(world), world.text.width
        drawn = {"omega": generator.normal(width, self.rank)}
        if self.epsilon is not None:
            drawn |= {
                "global": generator.normal(tokens, width),
                "left": generator.normal(tokens, self.rank),
                "right": generator.normal(self.rank, width),
            }
        return drawn

    def deviation(self, world: World, batch: Batch) -> Tensor | float:
        """s."""
        if self.epsilon is None:
            return 0.0
        images = len(batch.labels) if batch.weights is None else batch.weights.sum()
        return self.bound * math.sqrt(world.rounds * math.log(1 / self.delta)) / (self.epsilon * images)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        common, own = params["context"], params["local_context"]
        if batch.training:
            left, right = factors(own.detach(), noise["omega"].to(own))
            none = self.epsilon is None
            size = self.deviation(world, batch)
            of_left = torch.zeros_like(left) if none else size * noise["left"].to(own)
            of_right = torch.zeros_like(right) if none else size * noise["right"].to(own)
            bound = math.inf if none else self.bound
            own = low_rank_and_noisy(own, left, right, of_left, of_right, bound)
            if not none:
                share = size / math.sqrt(len(world.participants))
                common = clipped_and_noisy(common, share * noise["global"].to(own), self.bound)
        return Prompts(text={"context": self.as_context(common + own)})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["context"])


def factors(matrix: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """U (m, r) with orthonormal columns and V (r, d) with orthonormal rows, by one power iteration from omega (d, r)."""
    left = torch.linalg.qr(matrix @ omega).Q
    right = torch.linalg.qr(matrix.mT @ left).Q
    return left, right.mT
