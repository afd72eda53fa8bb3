"""PromptFL (Guo et al., 2023): one learnable text context P, trained by each client on its own images and averaged.

    T_c = g([P, name c]),   local objective CE(scale * I T^T, y),   P <- sum_k p_k P_k,   p_k = n_k / sum of the cohort's n

Both towers are frozen and no prompt enters the image tower, so images are encoded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedprompt.core.method import Batch, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_text import AVERAGED_RATE, RATES, WithText, similarity
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("promptfl")
@dataclass(frozen=True)
class PromptFL(WithText):
    """A text context averaged over clients."""

    rates: ClassVar[Mapping[str, float | str]] = {"context": AVERAGED_RATE, **RATES}

    def init(self, world: World, generator: Stream) -> Roles:
        return Roles(shared={"context": self.new_context(world, generator)})

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return Prompts(text={"context": self.as_context(params["context"])})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["context"])
