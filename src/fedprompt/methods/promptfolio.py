"""PromptFolio (NeurIPS 2024): the text features of a global and a local context are mixed in a fixed proportion.

    T_c = (1 - s) g([G, name c]) + s g([L, name c]),   logits = scale * I T^T,   objective CE over G and L together

G is averaged over clients, L stays. s is a fixed number. Both features have unit length and the mixture is not
normalised again, so logits are smaller where the two disagree. s = 0 is PromptFL, and s = 1 is CoOp at every client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Mixture, Seen, World
from fedprompt.core.registry import register
from fedprompt.methods.bases.with_local import WithLocalContext
from fedprompt.methods.bases.with_text import similarity
from fedprompt.tensors import Tensors


@register("promptfolio")
@dataclass(frozen=True)
class PromptFolio(WithLocalContext):
    """A mixture of the class features of a global and a local context."""

    local_share: Annotated[float, Field(ge=0, le=1)] = 0.4
    """s, weight of the local context in the mixture."""

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        mixed = torch.lerp(seen.text["context"], seen.text["local_context"], self.local_share)
        return similarity(world, seen.image, mixed)

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        shares = seen.image.new_tensor([1 - self.local_share, self.local_share])
        return (Mixture("contexts", ("global", "own"), shares.expand(len(seen.image), -1)),)
