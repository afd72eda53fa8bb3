"""FedPer (Arivazhagan et al., 2019): the head is local, everything else is averaged; both are trained together."""

from __future__ import annotations

from dataclasses import dataclass

from fedprompt.core.method import World
from fedprompt.core.registry import register_variant
from fedprompt.core.roles import Roles
from fedprompt.methods.variants.wrapper import Variant, with_local_head
from fedprompt.random_streams import Stream


@register_variant("fedper")
@dataclass(frozen=True)
class FedPer(Variant):
    """Keep the head local."""

    def init(self, world: World, generator: Stream) -> Roles:
        return with_local_head(self.inner.init(world, generator), "fedper")
