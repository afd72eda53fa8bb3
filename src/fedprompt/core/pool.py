"""A pool: one tensor for each client that has sent one, as a value inside the server's state.

Methods read it and add to it (`Server.pool`); they do not depend on where its rows are stored. A federation stores them in the run
file and announces which clients will download next, so that one pass over the pool serves many of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fedprompt.errors import ContractError
from fedprompt.modules.knn import Block, nearest, nearest_pairs

TOGETHER = 128  # clients that are answered in one pass
REMEMBERED = 8  # passes whose results are kept
BLOCK_BYTES = 32 * 2**20  # of rows, and of what is computed for each pair of row and client, in memory at a time
PAIR_BYTES = 8  # of these for one pair: its distance and the bound

Answer = TypeVar("Answer")


def rows_at_once(row_bytes: int) -> int:
    """How many rows make a block."""
    return max(1, BLOCK_BYTES // (row_bytes + PAIR_BYTES * TOGETHER))


class Rows(Protocol):
    """Stored rows, by the number of their client."""

    def clients(self) -> np.ndarray: ...
    def holds(self, client: int) -> bool: ...
    def chosen(self, clients: Sequence[int]) -> dict[int, Tensor]:
        """The rows of those clients that have one, in their shape."""
        ...

    def blocks(self) -> Iterator[Block]:
        """All rows, flat, in ascending order of clients."""
        ...

    def shortlists(self, own: Mapping[int, Tensor], count: int) -> dict[int, list[int]]:
        """Clients that are likely to be the `count` nearest, for those flat rows for which an approximate index finds enough."""
        ...


class EmptyRows:
    """No rows: the pool at the start of a run."""

    def clients(self) -> np.ndarray:
        return np.empty(0, dtype=np.int64)

    def holds(self, client: int) -> bool:
        return False

    def chosen(self, clients: Sequence[int]) -> dict[int, Tensor]:
        return {}

    def blocks(self) -> Iterator[Block]:
        return iter(())

    def shortlists(self, own: Mapping[int, Tensor], count: int) -> dict[int, list[int]]:
        return {}


@dataclass(frozen=True)
class Pool:
    """The stored rows and, in place of some of them, the newer ones in `pending`."""

    kept: Rows = field(default_factory=EmptyRows)
    pending: Mapping[int, Tensor] = field(default_factory=dict)
    asking: Sequence[int] = ()
    """Clients that are expected to download next, in ascending order."""
    _answers: OrderedDict[Hashable, Mapping[int, Any]] = field(default_factory=OrderedDict, repr=False, compare=False)

    def with_rows(self, rows: Mapping[int, Tensor]) -> Pool:
        """The pool with these rows in place of those the clients had; all rows of a pool have one shape and dtype."""
        changed = {client: rows[client].detach().cpu() for client in sorted(rows)}
        pending = {**self.pending, **changed}
        if len({(tuple(row.shape), row.dtype) for row in pending.values()}) > 1:
            raise ContractError("rows of a pool must have one shape and dtype, got several")
        return Pool(self.kept, dict(sorted(pending.items())))

    def for_clients(self, clients: Sequence[int]) -> Pool:
        """The same pool, prepared for these clients: one pass serves many of them. Without this, each client takes a pass of its own. The
        nearest clients do not depend on it; sums over the pool for many clients at once may differ in their last bits.
        """
        return replace(self, asking=clients, _answers=OrderedDict())

    @cached_property
    def clients(self) -> np.ndarray:
        """The numbers of all clients that have a row, in ascending order."""
        return np.union1d(self.kept.clients(), np.fromiter(self.pending, dtype=np.int64))

    def __contains__(self, client: int) -> bool:
        return client in self.pending or self.kept.holds(client)

    def rows(self, clients: Sequence[int]) -> Tensor:
        """The rows (k, ...) of at least one client."""
        found = self.kept.chosen([client for client in clients if client not in self.pending])
        return torch.stack([self.pending[client] if client in self.pending else found[client] for client in clients])

    def blocks(self) -> Iterator[Block]:
        """All rows, flat: the stored ones that are not replaced, then the pending ones."""
        new = np.fromiter(self.pending, dtype=np.int64)
        for block in self.kept.blocks():
            counts = ~np.isin(block.keys, new)
            yield block if counts.all() else Block(block.keys[counts], block.rows[torch.from_numpy(counts)])
        yield from self._pending_blocks()

    def _pending_blocks(self) -> Iterator[Block]:
        rows = list(self.pending.items())
        most = rows_at_once(rows[0][1].nbytes) if rows else 1
        for start in range(0, len(rows), most):
            part = dict(rows[start : start + most])
            yield Block(np.fromiter(part, dtype=np.int64), torch.stack(list(part.values())).reshape(len(part), -1))

    def nearest(self, client: int, count: int, approximate: bool = False) -> list[int]:
        """The clients whose rows are the `count` nearest to the row of this one (see `modules.knn`)."""

        def answer(clients: Sequence[int]) -> dict[int, list[int]]:
            return self._nearest(clients, count, approximate)

        return self.together(client, ("nearest", count, approximate), answer)

    def _nearest(self, clients: Sequence[int], count: int, approximate: bool) -> dict[int, list[int]]:
        own = {client: row.flatten() for client, row in zip(clients, self.rows(clients), strict=True)}
        likely = self.kept.shortlists(own, count) if approximate else {}
        rest = {client: row for client, row in own.items() if client not in likely}
        found = nearest(rest, self.blocks(), count) if rest else {}
        among_new = nearest_pairs({client: own[client] for client in likely}, self._pending_blocks(), count)
        for client, others in likely.items():
            among_kept = nearest_pairs({client: own[client]}, self._still_kept(others), count)[client]
            found[client] = [other for _, other in sorted([*among_kept, *among_new[client]])[:count]]
        return found

    def _still_kept(self, clients: Sequence[int]) -> Iterator[Block]:
        """The given rows without those that a pending one replaces."""
        still = sorted(client for client in clients if client not in self.pending)
        if still:
            yield Block(np.array(still), self.rows(still).reshape(len(still), -1))

    def together(self, client: int, what: Hashable, answer: Callable[[Sequence[int]], Mapping[int, Answer]]) -> Answer:
        """The result for a client that has a row. It is computed for the whole group of the client in one pass and kept."""
        group = self._group(client)
        key = (what, group[0])
        if key not in self._answers:
            self._answers[key] = answer([each for each in group if each in self])
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return cast(Answer, self._answers[key][client])

    def _group(self, client: int) -> Sequence[int]:
        """The group that a client is computed with, the same for all its members. A client that was not announced is alone."""
        place = bisect_left(self.asking, client)
        if place == len(self.asking) or self.asking[place] != client:
            return [client]
        start = place - place % TOGETHER
        return self.asking[start : start + TOGETHER]
