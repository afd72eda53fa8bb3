"""PromptFL with FedProx (Li et al., 2020): local training stays close to the received context.

    local objective   CE(scale * I T^T, y) + mu/2 ||P - P_g||^2,   P_g the context as received
    its gradient      that of PromptFL + mu (P - P_g)

The public code of this baseline computes the distance from detached tensors: the printed loss changes and the training
does not. Here it has a gradient. mu = 0 is PromptFL. `method: promptfl` with `variant: fedprox` is the same run; this
is the baseline under its own name and with the mu of its papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Client, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.variants.wrapper import squared_distance
from fedprompt.tensors import Tensors, pick, prefixed, stripped

RECEIVED = "received."  # the shared tensors as they came down


@register("promptfl_prox")
@dataclass(frozen=True)
class PromptFLProx(PromptFL):
    """An averaged text context; local training stays near it."""

    search_space: ClassVar[SearchSpace] = {"method.mu": FloatRange(1e-3, 10.0)}

    mu: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """Weight of the proximal term."""

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        anchors = prefixed(RECEIVED, pick(received, world.roles.shared))
        return {**super().begin(world, client, received, local), **anchors}

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        return plain + 0.5 * self.mu * squared_distance(params, stripped(RECEIVED, params))
