"""FedPR (Feng et al., CVPR 2023, arXiv 2303.16181): prompts that change only in unused directions.

For every prompted block, P in R^{K x d} the prompt as received and V_1 in R^{d x r} its r leading right-singular
directions (the leading eigenvectors of P^T P), each step D of the prompt, as the optimiser made it, is replaced by

    D Pi,        Pi = V_0 V_0^T = I - V_1 V_1^T,   divided by its Frobenius norm sqrt(d - r) if `normalise_projector`

r = int(d (1 - kept_share)). Where r >= rank(P), P (D Pi)^T = 0: the new prompt keeps what the old one did. The first
round is not projected, so it is FedVPT-D; `depth: 1` is the shallow version.

- The authors' code divides by the norm. Then every step but those of the first round is 25 times shorter (d = 768, 80 %
  kept), and no rate serves both. It is off by default, so that one rate serves all rounds.
- r is rounded down from the decimal number, not from its nearest float: d = 40 with 80 % kept drops 8 directions, where
  int(40 * (1 - 0.8)) is 7.
- Where r > rank(P), the dropped null directions depend on the linear algebra library: the invariants hold on every
  machine, the bits of a run only on machines with the same one. A zero prompt is the extreme case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Client, World
from fedprompt.core.registry import register
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.tensors import Tensors

DROPPED = "fedpr.dropped"  # V_1^T of every prompted block, (depth, r, d)


@register("fedpr")
@dataclass(frozen=True)
class FedPR(FedVPTDeep):
    """Shared deep prompts whose steps are orthogonal to the leading directions of the received prompt."""

    kept_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the d directions in which the prompt may change."""
    normalise_projector: bool = False
    """Divide the projector by its Frobenius norm, as the authors do."""

    def dropped(self, width: int) -> int:
        """r, the number of directions in which a prompt may not change."""
        return int(width * (1 - self.kept_share) + 1e-9)

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.dropped(world.width) == world.width:
            raise ConfigError(
                broken("method.kept_share", f"keep one of {world.width} directions at least", self.kept_share)
            )

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = super().begin(world, client, received, local)
        if client.round == 1:
            return params
        return {**params, DROPPED: leading_directions(received["prompt"], self.dropped(world.width))}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return {**received, **local}

    def after_step(self, world: World, params: Tensors, before: Tensors, step: int) -> Tensors:
        if DROPPED not in before or "prompt" not in params:
            return params
        old, directions = before["prompt"], before[DROPPED]
        change = params["prompt"] - old
        change = change - change @ directions.mT @ directions
        if self.normalise_projector:
            change = change / (world.width - self.dropped(world.width)) ** 0.5
        return {**params, "prompt": old + change}


def leading_directions(prompt: Tensor, count: int) -> Tensor:
    """The leading right-singular directions (depth, count, d) of the prompt (depth, K, d) of each block."""
    directions: Tensor = torch.linalg.svd(prompt.to("cpu", torch.float64), full_matrices=True).Vh
    return directions[..., :count, :].to(prompt.device, prompt.dtype)
