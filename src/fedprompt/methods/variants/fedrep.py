"""FedRep (Collins et al., 2021): first the client's own head with everything else fixed, then everything else with the head fixed.

Optimiser state does not survive the switch. With no head epochs and a head rate of zero elsewhere, the shared tensors follow federated
averaging exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.method import Stage, World
from fedprompt.methods.variants.base import Variant, with_local_head
from fedprompt.prompts import heads
from fedprompt.registry import register_variant
from fedprompt.roles import Roles


@register_variant("fedrep")
@dataclass(frozen=True)
class FedRep(Variant):
    """Head first, then the rest."""

    head_epochs: Annotated[int, Field(ge=0)] = 5  #: local epochs on the head before the rest is trained

    def init(self, world: World, generator: torch.Generator) -> Roles:
        return with_local_head(self.inner.init(world, generator), "fedrep")

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, heads.NAMES, self.head_epochs, "head"), *without_head(super().stages(world, train)))


def without_head(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The same stages with the head fixed."""
    return tuple(
        replace(stage, trainable=tuple(name for name in stage.trainable if name not in heads.NAMES)) for stage in stages
    )
