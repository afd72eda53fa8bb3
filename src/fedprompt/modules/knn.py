"""Exact nearest neighbours in a pool of rows, in bounded memory, and a random choice of rows.

The distance is D(x, q), the squared Euclidean distance summed in double precision, with ties ordered by key. Most rows
need no D. In one pass over blocks of rows, with c the middle of the queries, x' = x - c and q' = q - c, one matrix
product gives

    d = |x'|^2 + |q'|^2 - 2 x' . q'            |d - D| <= 6 (n + 8) u (|x'|^2 + |q'|^2) + what underflows

for rows of n numbers and rounding unit u, for any order of summation. D is computed only for rows whose d minus this
bound is no more than the count-th smallest distance so far, smallest first. Where single precision leaves too many of
them, the block is bounded in double precision; then only true ties remain. No skipped row could have been chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedprompt.random_streams import Stream

AT_ONCE = 64  # rows of which D is computed together
CROWD = 16  # more candidate rows than this per wanted neighbour are too many
FARTHEST = (math.inf, 2**63)


@dataclass(frozen=True)
class Block:
    """Some rows of a pool by rising keys. The rows may be overwritten when the next block is read."""

    keys: np.ndarray  # (B,)
    rows: Tensor  # (B, n)


def nearest(own: Mapping[int, Tensor], blocks: Iterable[Block], count: int) -> dict[int, list[int]]:
    """For each of `own` (n,) the keys of the `count` rows nearest to it, nearest first, its own key left out; all if
    there are fewer.
    """
    return {key: [other for _, other in found] for key, found in nearest_pairs(own, blocks, count).items()}


def nearest_pairs(own: Mapping[int, Tensor], blocks: Iterable[Block], count: int) -> dict[int, list[tuple[float, int]]]:
    """The same with their distances D, as rising pairs, so that several searches can be merged."""
    if not own or count < 1:
        return {key: [] for key in own}
    search = _Search(list(own), torch.stack(list(own.values())), count)
    for block in blocks:
        search.look_through(block)
    return dict(zip(own, search.found, strict=True))


@dataclass
class _Search:
    """The result of the blocks so far: for every query the best pairs of distance and key."""

    keys: Sequence[int]
    queries: Tensor  # (Q, n)
    count: int
    found: list[list[tuple[float, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.found = [[] for _ in self.keys]
        self.queries = self.queries.to(torch.promote_types(self.queries.dtype, torch.float32))
        self._centre = self.queries.double().mean(0).to(self.queries.dtype)

    def look_through(self, block: Block) -> None:
        lower = self._hopeful(block, torch.float32)
        if lower.isfinite().sum() > CROWD * self.count * len(self.keys):
            lower = self._hopeful(block, torch.float64)
        for place, bounds in enumerate(lower):
            hopeful = bounds.isfinite().nonzero().flatten()
            if len(hopeful):
                self._compare(place, block, hopeful, bounds[hopeful])

    def _compare(self, place: int, block: Block, rows: Tensor, lower: Tensor) -> None:
        """D of some rows of a block by rising lower bound, until the next bound is too large."""
        order = lower.argsort(stable=True)
        for part in order.split(max(AT_ONCE, self.count)):
            first = int(part[0])
            if (float(lower[first]), int(block.keys[rows[first]])) >= self._worst(place):
                return
            chosen = rows[part]
            distances = squared_distances(block.rows[chosen], self.queries[place])
            pairs = zip(distances.tolist(), block.keys[chosen.numpy()].tolist(), strict=True)
            self.found[place] = sorted([*self.found[place], *pairs])[: self.count]

    def _worst(self, place: int) -> tuple[float, int]:
        found = self.found[place]
        return found[-1] if len(found) == self.count else FARTHEST

    def _hopeful(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Lower bounds (Q, B) of D; infinite for rows that cannot be among those wanted, and for a query itself."""
        middle, bound = self._distances(block.rows, dtype)
        lower = (middle - bound).clamp_min_(0).nan_to_num_(nan=0.0, posinf=0.0)
        own, place = np.nonzero(np.asarray(self.keys)[:, None] == block.keys)
        lower[own, place] = math.inf
        limit = torch.tensor([self._worst(place)[0] for place in range(len(self.keys))], dtype=torch.float64)
        if limit.isinf().any() and len(block.keys) > self.count:  # one of the rows may be the query
            upper = (middle + bound).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=math.inf)
            upper[own, place] = math.inf
            limit = limit.minimum(upper.kthvalue(self.count, dim=1).values.double())
        return lower.masked_fill_(lower > limit.unsqueeze(1), math.inf)

    def _distances(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """d (Q, B), and how far it can be from D."""
        wide = torch.promote_types(self._centre.dtype, dtype)
        x, q = ((each.to(wide) - self._centre.to(wide)).to(dtype) for each in (rows, self.queries))
        norms = q.square().sum(1, keepdim=True) + x.square().sum(1)  # (Q, B)
        middle = torch.addmm(norms, q, x.T, alpha=-2)
        size, limits = x.shape[1], torch.finfo(dtype)
        rounding = (size + 8) * limits.eps / 2
        return middle, norms.mul_(6 * rounding if rounding < 0.1 else math.inf).add_(8 * size * limits.tiny)


def squared_distances(rows: Tensor, own: Tensor) -> np.ndarray:
    """D (B,) of rows (B, n). NumPy sums each row by itself, so the bits do not depend on other rows."""
    difference = rows.double().numpy() - own.double().numpy()
    total: np.ndarray = np.square(difference, out=difference).sum(axis=1)
    return total


def drawn(keys: Sequence[int] | np.ndarray, count: int, generator: Stream) -> list[int]:
    """`count` of the keys at random without repetition; all of them, in random order, if there are fewer."""
    ordered = np.sort(np.asarray(keys, dtype=np.int64))
    return ordered[generator.permutation(len(ordered))[:count].numpy()].tolist()
