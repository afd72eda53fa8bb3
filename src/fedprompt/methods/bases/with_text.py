"""Base of methods on a dual encoder: learnable contexts that a frozen text tower reads with every class name.

logits[b, c] = scale * <I_b, T_c>,   I_b the image and T_c the class in its context, both of unit length
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Method, Stage, World
from fedprompt.core.recipe import Recipe
from fedprompt.errors import ConfigError, broken
from fedprompt.modules.contexts import Position, TextContext, random_context
from fedprompt.random_streams import Stream

PLAIN_WORDS = "a photo of a"  # as CLIP's users put before a class name

# Of Adam, chosen on validation images (docs/discussion.md). What a frozen tower reads moves by a share of its own size.
RATES: Mapping[str, float | str] = {
    "*context": "80%",
    "*_text": "80%",
    "*vision": "2%",
    "coupling.*": 1e-4,
    "gate.*": 0.003,
    "fusion.*": 1e-5,  # a map of zeros from d numbers of order 1: its output changes by up to d times the rate
    "low_rank.*": 0.15,
}

# For a context with which everyone predicts as it was averaged: clients with different classes pull it in directions that
# mostly cancel, so the mean step is a fraction of a client's.
AVERAGED_RATE = "240%"


@dataclass(frozen=True)
class WithText(Method):
    """Reads images and class names. The method decides what its text contexts are and where they are kept."""

    rates: ClassVar[Mapping[str, float | str]] = RATES
    """Recommended learning rates by name pattern of tensors."""

    context_tokens: Annotated[int, Field(ge=1)] | None = None
    """m, learnable words of a context that begins at random, as in CoOp; null for one that begins as words."""
    context_words: str = ""
    """Words a context begins with; they determine m. When empty: "a photo of a", unless `context_tokens` is given."""
    class_position: Position = "end"
    """Where the class name stands: after the context, inside it, or before it."""
    class_specific: bool = False
    """One context per class instead of one for all."""

    @property
    def recipe(self) -> Recipe:
        return Recipe(lr=0.001, lrs=self.rates, schedule="cosine")

    @property
    def uses_text(self) -> bool:
        return True

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image",)

    def check(self, world: World, train: TrainConfig) -> None:
        if self.first_words is not None and not len(world.text.words(self.first_words)):
            raise ConfigError(broken("method.context_words", "have at least one token", self.first_words))
        setting = "context_tokens" if self.first_words is None else "context_words"
        check_room(world, setting, self.context_length(world))

    @property
    def first_words(self) -> str | None:
        """The words a context begins with; None for a random start."""
        return self.context_words or (PLAIN_WORDS if self.context_tokens is None else None)

    def context_length(self, world: World) -> int:
        """m, tokens of a context: from its initial words, or from the settings."""
        return self.context_tokens or 0 if self.first_words is None else len(world.text.words(self.first_words))

    def new_context(self, world: World, generator: Stream) -> Tensor:
        """An initial context, (m, d) or (C, m, d): some words, or N(0, 0.02^2)."""
        classes = world.classes if self.class_specific else None
        if self.first_words is not None:
            words = world.text.words(self.first_words)
            return words.clone() if classes is None else words.repeat(classes, 1, 1)
        drawn = random_context(self.context_length(world), world.text.width, generator, classes)
        return drawn.to(world.device, world.dtype)

    def as_context(self, tokens: Tensor) -> TextContext:
        return TextContext(tokens, self.class_position)

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        """A held-out client trains its local tensors and does not change the shared ones."""
        stages = self.stages(world, train)
        own = [tuple(name for name in stage.trainable if name in world.roles.local) for stage in stages]
        return tuple(
            replace(stage, trainable=names, epochs=epochs, name=f"newcomer.{stage.name}")
            for stage, names in zip(stages, own, strict=True)
        )


def check_room(world: World, setting: str, tokens: int) -> None:
    """Raise unless every class name fits into the text tower beside a context of that many tokens."""
    room = world.text.room
    if room is not None and tokens > room:
        rule = f"make at most {room} context tokens, so that the longest class name fits into the text tower"
        raise ConfigError(broken(f"method.{setting}", rule, f"{tokens} tokens"))


def check_words(world: World, setting: str, words: str) -> None:
    """Raise unless the words have a token."""
    if not len(world.text.words(words)):
        raise ConfigError(broken(f"method.{setting}", "have at least one token", words))


def precise(tensor: Tensor) -> Tensor:
    """In at least float32: bfloat16 would round away the differences between similarities."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def similarity(world: World, image: Tensor, text: Tensor) -> Tensor:
    """Logits (B, C) of images (B, D) and classes (C, D), in at least float32."""
    return world.text.scale * precise(image) @ precise(text).T + world.text.bias
