"""Blocks whose activations are computed again for the gradients instead of stored: less memory, more arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedprompt.backbones.block import Block
from fedprompt.backbones.layers import Weights
from fedprompt.backbones.rotary import Turns
from fedprompt.backbones.shape import ViTShape


@dataclass(frozen=True)
class RecomputedBlock:
    """Another block, of which only the pieces that go in are kept until the gradients are computed."""

    block: Block

    def __call__(
        self, weights: Weights, shape: ViTShape, live: Sequence[Tensor], passive: Sequence[Tensor], turns: Turns = ()
    ) -> list[Tensor]:
        if not torch.is_grad_enabled():
            return self.block(weights, shape, live, passive, turns)

        def again(*pieces: Tensor) -> list[Tensor]:
            return self.block(weights, shape, pieces[: len(live)], pieces[len(live) :], turns)

        # nothing is drawn at random inside
        found: list[Tensor] = checkpoint(again, *live, *passive, use_reentrant=False, preserve_rng_state=False)
        return found
