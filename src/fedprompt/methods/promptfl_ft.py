"""PromptFL with fine-tuning: before a test, every client trains a temporary copy of the averaged context.

    federation   as PromptFL: P <- sum_k p_k P_k
    test         P_k = P after `finetune_epochs` of SGD on CE(scale * I T^T, y) over the images of client k

Fine-tuning is no part of the federation: the copy is neither kept nor sent, so the shared context is that of PromptFL
to the bit. It starts with the full learning rates and new momentum. A held-out client does the same with
`federation.newcomer_epochs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Stage, World
from fedprompt.core.registry import register
from fedprompt.methods.bases.with_text import RATES
from fedprompt.methods.promptfl import PromptFL


@register("promptfl_ft")
@dataclass(frozen=True)
class PromptFLFineTuned(PromptFL):
    """An averaged text context, tuned by every client before a test."""

    rates: ClassVar[Mapping[str, float | str]] = RATES

    finetune_epochs: Annotated[int, Field(ge=0)] | None = None
    """Epochs on a copy before a test; null for train.epochs."""

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        epochs = train.epochs if self.finetune_epochs is None else self.finetune_epochs
        return (Stage(self, tuple(world.roles.shared), epochs, "finetune"),)

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return (Stage(self, tuple(world.roles.shared), epochs, "newcomer"),)
