"""Local-only: every client tunes its own prompts and its own head; clients never communicate.

The baseline that a federation has to beat. The model is FedVPT's (`depth: null` for the deep one); only the roles
differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedprompt.core.method import World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import Stream


@register("local")
@dataclass(frozen=True)
class Local(FedVPT):
    """Prompts that never leave their client."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        everything = {**roles.shared, **roles.local}
        shared = {} if self.head == "local" else {name: everything[name] for name in NAMES}
        return Roles(shared=shared, local={name: tensor for name, tensor in everything.items() if name not in shared})
