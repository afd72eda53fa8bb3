"""CoOp (Zhou et al., 2022) at every client: a learnable text context that is never shared.

It trains in every round in which its client takes part, with the same number of epochs as other methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedprompt.core.method import World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_text import RATES
from fedprompt.methods.promptfl import PromptFL
from fedprompt.random_streams import Stream


@register("coop")
@dataclass(frozen=True)
class CoOp(PromptFL):
    """A local text context for every client."""

    rates: ClassVar[Mapping[str, float | str]] = RATES

    def init(self, world: World, generator: Stream) -> Roles:
        return Roles(local=super().init(world, generator).shared)
