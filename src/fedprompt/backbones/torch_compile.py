"""Blocks of a vision transformer through torch.compile.

All blocks are one function of their weights, so they share graphs: there is one for every set of pieces, with and
without gradients, for all blocks and batch sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fedprompt.backbones.block import Block, run_block
from fedprompt.backbones.layers import Weights
from fedprompt.backbones.rotary import Turns
from fedprompt.backbones.shape import ViTShape

GRAPHS = 64  # graphs that torch may compile before it falls back; a sweep over methods needs more than the default 8


class CompiledBlock:
    """`run_block`, compiled on the first call. If this machine cannot, it runs uncompiled, with one warning."""

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._block: Block | None = None

    def __call__(
        self, weights: Weights, shape: ViTShape, live: Sequence[Tensor], passive: Sequence[Tensor], turns: Turns = ()
    ) -> list[Tensor]:
        if self._block is run_block:
            return run_block(weights, shape, live, passive, turns)
        try:
            self._block = self._block or translated(self._backend)
            for piece in (*live, *passive):
                torch._dynamo.maybe_mark_dynamic(piece, 0)
            return self._block(weights, shape, live, passive, turns)
        except Exception as error:  # a compiler that is missing or broken shows in many ways
            found = run_block(weights, shape, live, passive, turns)  # raises too if the pieces are wrong
            self._block = run_block
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"engine.compile has no effect, for torch.compile fails here: {reason}", stacklevel=2)
            return found


def translated(backend: str) -> Block:
    """The compiled function; compiled on its first call."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    return torch.compile(run_block, fullgraph=True, backend=backend)
