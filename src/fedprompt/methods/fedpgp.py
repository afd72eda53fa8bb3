"""FedPGP (Cui et al., ICML 2024): a client's context is the global one plus a low-rank change.

    P = G + U V,   G (m, d) averaged,   U (m, r) and V (r, d) local, all of them N(0, 0.02^2) at first

t0_c, tG_c and tP_c are the features of class c with plain words, with the global context and with the client's context.
The global context is pulled towards the plain words, and the client's context is pushed away from the global one:

    L = CE(scale * I tP^T, y) + mu * mean_c -log( e^{<t0_c, tG_c> / tau} / (e^{<t0_c, tG_c> / tau} + e^{<tG_c, tP_c> / tau}) )

U = 0 is PromptFL with that pull; a client that never took part predicts with it. The contrast is needed only in
training, so an evaluation runs the text tower only on P.

The authors' code makes t0 of its placeholder sentence, "X X ... X name.", where the paper means "a photo of a name.";
we take the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.bases.with_local import WithLocal
from fedprompt.methods.bases.with_text import check_words, similarity
from fedprompt.modules.contexts import STANDARD_DEVIATION
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

ANCHOR = "anchor"  # t0, the classes with plain words


@register("fedpgp")
@dataclass(frozen=True)
class FedPGP(WithLocal):
    """A global context and low-rank changes of it."""

    search_space: ClassVar[SearchSpace] = {
        "method.contrast_weight": FloatRange(0.01, 10.0),
        "method.temperature": FloatRange(0.05, 5.0),
    }

    rank: Annotated[int, Field(ge=1)] = 8
    """r, rank of a client's change."""
    contrast_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """Mu, weight of the contrast; 0 for none."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Tau, temperature of the contrast."""
    anchor_words: str = "a photo of a"
    """Words before the class names to which the global context is pulled."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        check_words(world, "anchor_words", self.anchor_words)

    def own(self, world: World, context: Tensor, generator: Stream) -> Tensors:
        *several, tokens, width = context.shape
        drawn = {
            "low_rank.left": generator.normal(*several, tokens, self.rank),
            "low_rank.right": generator.normal(*several, self.rank, width),
        }
        return world.placed({name: STANDARD_DEVIATION * tensor for name, tensor in drawn.items()})

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        return {"low_rank.left": torch.zeros_like(local["low_rank.left"])}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = super().begin(world, client, received, local)
        return {**params, ANCHOR: world.text.encode_words(self.anchor_words)} if self.contrast_weight else params

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        changed = params["context"] + params["low_rank.left"] @ params["low_rank.right"]
        said = {"own": self.as_context(changed)}
        if batch.training and self.contrast_weight:
            said["global"] = self.as_context(params["context"])
        return Prompts(text=said)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["own"])

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if not self.contrast_weight:
            return plain
        return plain + self.contrast_weight * self.contrast(params[ANCHOR], seen.text["global"], seen.text["own"])

    def contrast(self, anchor: Tensor, shared: Tensor, own: Tensor) -> Tensor:
        """-log of the softmax at the anchor, over the two similarities of the global context; mean over classes."""
        positive, negative = (anchor * shared).sum(-1), (shared * own).sum(-1)
        return F.softplus((negative - positive) / self.temperature).mean()
