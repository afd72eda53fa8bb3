"""FedBABU (Oh et al., 2022): one random head for all clients that is never updated while the rest is federated.

Before an evaluation each client tunes the head for a few epochs on a copy that is then discarded. The head starts at
random: with a zero head no gradient would reach the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Stage, World
from fedprompt.core.registry import register_variant
from fedprompt.core.roles import Roles
from fedprompt.methods.variants.fedrep import without_head
from fedprompt.methods.variants.wrapper import Variant, with_local_head
from fedprompt.modules import heads
from fedprompt.random_streams import Stream


@register_variant("fedbabu")
@dataclass(frozen=True)
class FedBABU(Variant):
    """Train the body, tune the head at the end."""

    finetune_epochs: Annotated[int, Field(ge=0)] = 5
    """Epochs on the head before an evaluation."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = with_local_head(self.inner.init(world, generator), "fedbabu")
        return replace(
            roles,
            local={
                **roles.local,
                **heads.random_head(world.classes, world.width, world.dtype, world.device, generator),
            },
        )

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return without_head(super().stages(world, train))

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (*super().adaptation(world, train), Stage(self, heads.NAMES, self.finetune_epochs, "head"))
