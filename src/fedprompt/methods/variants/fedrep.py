"""FedRep (Collins et al., 2021): train the local head first, then everything else with the head fixed.

Optimiser state does not survive the switch. With no head epochs and a head rate of zero elsewhere, the shared tensors
equal those of federated averaging.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Stage, World
from fedprompt.core.registry import register_variant
from fedprompt.core.roles import Roles
from fedprompt.methods.variants.wrapper import Variant, with_local_head
from fedprompt.modules import heads
from fedprompt.random_streams import Stream


@register_variant("fedrep")
@dataclass(frozen=True)
class FedRep(Variant):
    """Head first, then the rest."""

    head_epochs: Annotated[int, Field(ge=0)] = 5
    """Local epochs on the head before the rest is trained."""

    def init(self, world: World, generator: Stream) -> Roles:
        return with_local_head(self.inner.init(world, generator), "fedrep")

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, heads.NAMES, self.head_epochs, "head"), *without_head(super().stages(world, train)))


def without_head(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The same stages with the head fixed."""
    return tuple(
        replace(stage, trainable=tuple(name for name in stage.trainable if name not in heads.NAMES)) for stage in stages
    )
