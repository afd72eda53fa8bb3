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
from typing import ClassVar

import torch
from torch import Tensor

from fedprompt.core.method import World
from fedprompt.core.registry import register
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.bases.with_low_rank import LEFT, RIGHT, WithLowRank
from fedprompt.modules.contexts import STANDARD_DEVIATION
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("fedpgp")
@dataclass(frozen=True)
class FedPGP(WithLowRank):
    """A global context and low-rank changes of it."""

    search_space: ClassVar[SearchSpace] = {
        "method.contrast_weight": FloatRange(0.01, 10.0),
        "method.temperature": FloatRange(0.05, 5.0),
    }

    def own(self, world: World, context: Tensor, generator: Stream) -> Tensors:
        *several, tokens, width = context.shape
        drawn = {
            LEFT: generator.normal(*several, tokens, self.rank),
            RIGHT: generator.normal(*several, self.rank, width),
        }
        return world.placed({name: STANDARD_DEVIATION * tensor for name, tensor in drawn.items()})

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        return {LEFT: torch.zeros_like(local[LEFT])}

    def rivals(self, anchor: Tensor, shared: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return (anchor * shared).sum(-1), (shared * own).sum(-1)
