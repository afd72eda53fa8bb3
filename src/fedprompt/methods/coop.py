"""CoOp (Zhou et al., 2022) on every client alone: a learnable text context that is never shared.

It trains in every round its client takes part in, as many epochs as the others do, so it costs what they cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprompt.method import World
from fedprompt.methods.promptfl import PromptFL
from fedprompt.registry import register
from fedprompt.roles import Roles


@register("coop")
@dataclass(frozen=True)
class CoOp(PromptFL):
    """A text context of every client's own."""

    def init(self, world: World, generator: torch.Generator) -> Roles:
        return Roles(local=super().init(world, generator).shared)
