"""Low-rank changes of frozen attention weights (LoRA; Hu et al., 2021, arXiv 2106.09685).

A change of a d x d projection is a product B A of a (d, r) and an (r, d) factor, times alpha / r. The factors of all changed blocks and
projections are stacked in two tensors, A (blocks, targets, r, d) and B (blocks, targets, d, r).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedprompt.modules.init import uniform
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

Target = Literal["q", "k", "v"]

ROWS: tuple[Target, ...] = ("q", "k", "v")  # how the backbone stacks the projections of a block


def initial_factors(blocks: int, targets: int, rank: int, width: int, generator: Stream) -> tuple[Tensor, Tensor]:
    """LoRA's start: A uniform in ±1/sqrt(d), which is Kaiming's bound for a slope of sqrt(5), and B zero, so that nothing changes yet."""
    a = uniform((blocks, targets, rank, width), width, generator)
    return a, torch.zeros(blocks, targets, width, rank)


def product(a: Tensor, b: Tensor) -> Tensor:
    """B A, (blocks, targets, d, d)."""
    return b @ a


def stacked(factors: Sequence[tuple[Tensor, Tensor]], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """All pairs as one of the summed rank, A's shares included: the product of the two is the weighted sum of the products."""
    a = torch.cat([share * a for (a, _), share in zip(factors, shares, strict=True)], dim=-2)
    return a, torch.cat([b for _, b in factors], dim=-1)


def attention_changes(change: Tensor, targets: Sequence[Target]) -> Tensors:
    """A change (blocks, targets, d, d) as the backbone wants it: per block, (3d, d) with zeros where nothing is changed."""
    nothing = torch.zeros_like(change[0, 0])
    return {
        f"blocks.{number}.attention.in.weight": torch.cat(
            [block[targets.index(row)] if row in targets else nothing for row in ROWS]
        )
        for number, block in enumerate(change)
    }
