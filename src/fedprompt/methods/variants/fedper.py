"""FedPer (Arivazhagan et al., 2019): the head is every client's own, all else is averaged; both are trained together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprompt.method import World
from fedprompt.methods.variants.base import Variant, with_local_head
from fedprompt.registry import register_variant
from fedprompt.roles import Roles


@register_variant("fedper")
@dataclass(frozen=True)
class FedPer(Variant):
    """Keep the head at home."""

    def init(self, world: World, generator: torch.Generator) -> Roles:
        return with_local_head(self.inner.init(world, generator), "fedper")
