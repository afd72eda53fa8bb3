"""FedProx (Li et al., 2020): the local objective is CE + mu/2 ||P - P_g||^2, P_g the shared tensors as received.

mu = 0 is plain federated averaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Client, Seen, World
from fedprompt.core.registry import register_variant
from fedprompt.core.roles import Roles
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.variants.wrapper import Variant, require_shared, squared_distance
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, pick, prefixed, stripped


@register_variant("fedprox")
@dataclass(frozen=True)
class FedProx(Variant):
    """Stay close to the received tensors."""

    search_space: ClassVar[SearchSpace] = {"variant.mu": FloatRange(1e-4, 1.0)}

    prefix: ClassVar[str] = "fedprox."
    mu: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the proximal term."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = self.inner.init(world, generator)
        require_shared(roles, "fedprox")
        return roles

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return {
            **super().begin(world, client, received, local),
            **prefixed(self.prefix, pick(received, world.roles.shared)),
        }

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        return plain + 0.5 * self.mu * squared_distance(params, stripped(self.prefix, params))
