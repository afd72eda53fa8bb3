"""Who in a pool of tensors is near to whom, and a fair draw from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def nearest(own: Tensor, others: Mapping[int, Tensor], count: int) -> list[int]:
    """The keys of the `count` tensors nearest to `own`, nearest first; all of them if there are fewer.

    Distances are Euclidean on the raw numbers, in double precision, and equal ones are ordered by key. The others are looked
    at one by one, so memory does not grow with their number, and equal tensors have equal distances wherever they stand.
    """
    if not others:
        return []
    reference = own.double()
    squared = torch.stack([(other - reference).square().sum() for other in others.values()]).tolist()
    return [key for _, key in sorted(zip(squared, others, strict=True))][:count]


def drawn(keys: Iterable[int], count: int, generator: torch.Generator) -> list[int]:
    """`count` of the keys at random without repetition; all of them, in random order, if there are fewer."""
    ordered = sorted(keys)
    return [ordered[place] for place in torch.randperm(len(ordered), generator=generator)[:count].tolist()]
