"""Base of methods in which a client's context is the global one plus a change of low rank, with a contrast between both.

P = G + U V,   G (m, d) averaged,   U (m, r) and V (r, d) local
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Prompts, Seen, World
from fedprompt.methods.bases.with_local import WithLocal
from fedprompt.methods.bases.with_text import PLAIN_WORDS, check_words, similarity
from fedprompt.tensors import Tensors

ANCHOR = "anchor"  # t0, the classes with plain words
LEFT, RIGHT = "low_rank.left", "low_rank.right"  # U and V


@dataclass(frozen=True)
class WithLowRank(WithLocal):
    """A global context, and the client's own as a low-rank change of it."""

    rank: Annotated[int, Field(ge=1)] = 8
    """r, rank of a client's change."""
    contrast_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """Mu, weight of the contrast; 0 for none."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Tau, temperature of the contrast."""
    anchor_words: str = PLAIN_WORDS
    """Words before the class names to which the global context is pulled."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        check_words(world, "anchor_words", self.anchor_words)

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = super().begin(world, client, received, local)
        return {**params, ANCHOR: world.text.encode_words(self.anchor_words)} if self.contrast_weight else params

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        """The global context is read in training only, for the contrast."""
        said = {"own": self.as_context(params["context"] + params[LEFT] @ params[RIGHT])}
        if batch.training and self.contrast_weight:
            said["global"] = self.as_context(params["context"])
        return Prompts(text=said)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["own"])

    def rivals(self, anchor: Tensor, shared: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """The similarities (C,) that the contrast raises and lowers, of features with plain words, with G and with P."""
        raise NotImplementedError(f"{type(self).__name__}.rivals")

    def contrast(self, anchor: Tensor, shared: Tensor, own: Tensor) -> Tensor:
        """-log of the softmax, at temperature tau, at the first of both similarities; mean over classes."""
        positive, negative = self.rivals(anchor, shared, own)
        return F.softplus((negative - positive) / self.temperature).mean()

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if "global" not in seen.text:
            return plain
        return plain + self.contrast_weight * self.contrast(params[ANCHOR], seen.text["global"], seen.text["own"])
