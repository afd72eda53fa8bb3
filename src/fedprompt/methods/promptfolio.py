"""PromptFolio (NeurIPS 2024): the text features of a global and a local context are mixed like the assets of a portfolio.

    T_c = (1 - s) g([G, name c]) + s g([L, name c]),   logits = scale * I T^T,   objective CE over G and L together

G is averaged over clients, L stays. s is a fixed number. Both features have unit length and the mixture is not normalised again, so logits
are smaller where the two disagree. s = 0 is PromptFL, and s = 1 is CoOp on every client alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.method import Batch, Mixture, Seen, World
from fedprompt.methods.with_own import WithOwnContext
from fedprompt.methods.with_text import similarity
from fedprompt.registry import register
from fedprompt.roles import Tensors


@register("promptfolio")
@dataclass(frozen=True)
class PromptFolio(WithOwnContext):
    """A mixture of the classes as the federation and as the client puts them."""

    local_share: Annotated[float, Field(ge=0, le=1)] = 0.4  #: s, the local context's part of the mixture

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        mixed = torch.lerp(seen.text["context"], seen.text["local_context"], self.local_share)
        return similarity(world, seen.image, mixed)

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        shares = seen.image.new_tensor([1 - self.local_share, self.local_share])
        return (Mixture("contexts", ("global", "own"), shares.expand(len(seen.image), -1)),)
