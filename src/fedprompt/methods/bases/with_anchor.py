"""An averaged context beside fixed class features of plain words."""

from __future__ import annotations

from dataclasses import dataclass

from fedprompt.config import TrainConfig
from fedprompt.core.method import Client, World
from fedprompt.methods.bases.with_text import PLAIN_WORDS, check_words
from fedprompt.methods.promptfl import PromptFL
from fedprompt.tensors import Tensors

ANCHOR = "anchor"  # T0, the classes with plain words


@dataclass(frozen=True)
class Anchored(PromptFL):
    """PromptFL that knows the class features of plain words in training."""

    anchor_words: str = PLAIN_WORDS
    """Words before the class names whose class features are the anchor."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        check_words(world, "anchor_words", self.anchor_words)

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return {**received, **local, ANCHOR: world.text.encode_words(self.anchor_words)}
