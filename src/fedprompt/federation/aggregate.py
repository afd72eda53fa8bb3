"""Pure functions that turn the tensors of a cohort into one set."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedprompt.errors import ContractError, broken
from fedprompt.roles import Tensors


def shares(sizes: Sequence[float]) -> list[float]:
    """Non-negative weights that sum to one, in proportion to the sizes; clients without samples get nothing."""
    if any(not size >= 0 for size in sizes):
        raise ContractError(broken("aggregation weights", "be at least 0", list(sizes)))
    total = sum(sizes)
    if not 0 < total < float("inf"):
        raise ContractError(broken("aggregation weights", "have a positive, finite sum", list(sizes)))
    return [size / total for size in sizes]


def weighted_mean(tensors: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The weighted mean of each named tensor. Summed in double precision; the caller fixes the order of clients."""
    if not tensors:
        raise ContractError("aggregation must have at least one upload, got none")
    result = {}
    for name, first in tensors[0].items():
        total = torch.zeros(first.shape, dtype=torch.float64)
        for part, weight in zip(tensors, weights, strict=True):
            total += weight * part[name].to("cpu", torch.float64)
        result[name] = total.to(first.dtype).to(first.device)
    return result
