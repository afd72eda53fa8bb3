"""Local-only: every client tunes its own prompts and its own head, and nobody talks to anybody.

The floor that a federation has to beat. The model is FedVPT's (`depth: null` for the deep one); only the roles differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprompt.method import World
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.prompts.heads import NAMES
from fedprompt.registry import register
from fedprompt.roles import Roles


@register("local")
@dataclass(frozen=True)
class Local(FedVPT):
    """Prompts that never leave their client."""

    def init(self, world: World, generator: torch.Generator) -> Roles:
        roles = super().init(world, generator)
        everything = {**roles.shared, **roles.local}
        shared = {} if self.head == "local" else {name: everything[name] for name in NAMES}
        return Roles(shared=shared, local={name: tensor for name, tensor in everything.items() if name not in shared})
