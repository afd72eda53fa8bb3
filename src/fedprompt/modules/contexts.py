"""What a method puts into a text tower: learnable words around the class names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedprompt.random_streams import Stream

Position = Literal["end", "middle", "front"]  # where the class name stands: behind the context, inside it, before it

STANDARD_DEVIATION = 0.02  # of a random context
APART = 0.002  # of contexts that begin beside the same words: a tenth of it


@dataclass(frozen=True)
class TextContext:
    """Tokens that stand with every class name: the same for all classes, one set per class, or one set per image."""

    tokens: Tensor  # (m, d), (C, m, d) per class, or (B, m, d) per image
    position: Position = "end"
    per_image: bool = False
    """The first axis of the tokens is that of the images; the text features are then (B, C, D)."""
    names: tuple[str, ...] = ()
    """Names it stands with instead of the class names, such as those of what no class is."""


@dataclass(frozen=True)
class Language:
    """The text side of a dual encoder as a method sees it, with the class names of its world."""

    width: int
    """Of a context token."""
    features: int
    """D, dimensions of the space that images and texts share."""
    scale: float
    """Logits are scale * <image, text> + bias."""
    words: Callable[[str], Tensor]
    """The tokens (n, d) of some words, in the text tower's own embedding."""
    encode: Callable[[Tensor, Position], Tensor]
    """Unit vectors (N, C, D) of all classes in each of N contexts (N, m, d) or (N, C, m, d)."""
    room: int | None = None
    """Most tokens of a context that leave room for the longest class name; None for no limit."""
    encode_names: Callable[[], Tensor] = lambda: torch.empty(0)
    """Unit vectors (C, D) of the bare class names, without a context and without the full stop."""
    bias: float = 0.0
    encode_unstored: Callable[[Tensor, Position, Mapping[str, Tensor]], Tensor] | None = None
    """As `encode`, for contexts that never come again, by a tower with such changes of its weights; `None` where there are
    no names to encode.
    """
    depth: int = 0
    """Blocks of the text tower."""
    for_names: Callable[[tuple[str, ...]], Language] | None = None
    """The same tower with other names, or whole sentences, in place of the class names."""

    def with_names(self, names: tuple[str, ...]) -> Language:
        """The same tower with other names; without any, that of the class names."""
        if not names:
            return self
        assert self.for_names is not None
        return self.for_names(names)

    def encode_words(self, words: str) -> Tensor:
        """Unit vectors (C, D) of all classes behind some plain words, such as "a photo of a"."""
        with torch.no_grad():
            return self.encode(self.words(words).unsqueeze(0), "end")[0]


def random_context(tokens: int, width: int, generator: Stream, classes: int | None = None) -> Tensor:
    """CoOp's start, N(0, 0.02^2): one context (m, d), or one per class (C, m, d)."""
    size = (tokens, width) if classes is None else (classes, tokens, width)
    return STANDARD_DEVIATION * generator.normal(*size)
