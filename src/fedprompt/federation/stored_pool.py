"""The rows of a pool in the run file: read in bounded blocks, written with the round that changed them.

A row is stored as raw little-endian numbers, with its kind: "F32 16 512" is a tensor of 16 x 512 single-precision
numbers. All rows of a run have one kind, that of something clients upload. Memory holds eight bytes for each client in the pool and one
block of rows; an approximate index, built only if it is used, holds about a kilobyte for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fedprompt.core.method import World
from fedprompt.core.pool import Pool, rows_at_once
from fedprompt.errors import ContractError, RunError
from fedprompt.federation.pool_index import PoolIndex
from fedprompt.modules.knn import Block
from fedprompt.runs.store import PoolChange, RunReader
from fedprompt.tensors import Tensors, stripped

SIZE = re.compile("[1-9][0-9]{0,8}")
NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # of a client, in the name of an old row
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OLD_ROWS = "pool."  # what a row was called among the server's own tensors in version 1


@dataclass(frozen=True)
class Kind:
    """Dtype and shape of a row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Kind:
        name, *sizes = text.split(" ")
        if name not in DTYPES or not all(SIZE.fullmatch(size) for size in sizes):
            _damaged(f"have a kind such as 'F32 16 512', got {text[:100]!r}")
        return cls(DTYPES[name], tuple(int(size) for size in sizes))

    def __str__(self) -> str:
        return " ".join([NAMES.get(self.dtype, str(self.dtype)), *map(str, self.shape)])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def packed(row: Tensor) -> tuple[str, bytes]:
    """Kind and bytes of a row."""
    return str(Kind(row.dtype, tuple(row.shape))), row.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class StoredRows:
    """The rows of a run file for `fedprompt.core.pool`, and what a commit writes.

    If a world is given, rows are checked: they must belong to its clients and have a shape that clients upload.
    """

    def __init__(self, reader: RunReader, world: World | None = None) -> None:
        self._reader, self._world = reader, world
        self._clients: np.ndarray | None = None
        self._kind: Kind | None = None
        self._text = ""
        self._index = PoolIndex(self, reader.pool_cells)

    def clients(self) -> np.ndarray:
        if self._clients is None:
            clients = np.array(self._reader.pool_clients(), dtype=np.int64)
            for client in clients[[0, -1]].tolist() if len(clients) else ():
                _check_client(client, self._world)
            self._clients = clients
        return self._clients

    def holds(self, client: int) -> bool:
        known = self.clients()
        place = int(np.searchsorted(known, client))
        return place < len(known) and bool(known[place] == client)

    def chosen(self, clients: Sequence[int]) -> dict[int, Tensor]:
        found = {}
        for client, text, row in self._reader.pool_chosen([int(client) for client in clients]) if len(clients) else ():
            kind = self._checked(text, row)
            found[client] = _finite(torch.frombuffer(bytearray(row), dtype=kind.dtype).view(kind.shape))
        return found

    def blocks(self) -> Iterator[Block]:
        for block, _ in self.dated_blocks():
            yield block

    def dated_blocks(self) -> Iterator[tuple[Block, np.ndarray]]:
        """Blocks, and in which round each of their rows was written. One buffer serves them all."""
        kind = self._stored_kind()
        if kind is None:
            return
        most = min(rows_at_once(kind.nbytes), len(self.clients()))
        buffer, last = np.empty((most, kind.nbytes), dtype=np.uint8), -1
        while True:
            keys, rounds = [], []
            for place, (client, round, text, row) in enumerate(self._reader.pool_rows(last, most)):
                self._checked(text, row)
                if client <= last:
                    _damaged(f"follow that of client {last}, got that of {client}")
                buffer[place] = np.frombuffer(row, dtype=np.uint8)
                keys.append(client)
                rounds.append(round)
                last = client
            if not keys:
                return
            rows = _finite(torch.from_numpy(buffer[: len(keys)]).view(kind.dtype))
            yield Block(np.array(keys, dtype=np.int64), rows), np.array(rounds, dtype=np.int64)

    def _stored_kind(self) -> Kind | None:
        """The kind of the rows, from the first of them."""
        if self._kind is None and len(self.clients()):
            for _, _, text, row in self._reader.pool_rows(-1, 1):
                self._checked(text, row)
        return self._kind

    def _checked(self, text: str, row: bytes) -> Kind:
        """The kind of all rows; a row of another kind is damaged."""
        if self._kind is None:
            kind = Kind.parse(text)
            _check_kind(kind, self._world)
            self._kind, self._text = kind, text
        if text != self._text or len(row) != self._kind.nbytes:
            _damaged(f"be {self._kind.nbytes} bytes of kind {self._text!r}, got {len(row)} of {text[:100]!r}")
        return self._kind

    def shortlists(self, own: Mapping[int, Tensor], count: int) -> dict[int, list[int]]:
        return self._index.shortlists(own, count)

    def change(self, pool: Pool) -> PoolChange:
        """What a commit has to write of a pool over these rows."""
        for row in list(pool.pending.values())[:1]:
            self._check_new(Kind(row.dtype, tuple(row.shape)))
        return PoolChange({client: packed(row) for client, row in pool.pending.items()}, self._index.unstored)

    def _check_new(self, kind: Kind) -> None:
        """Refuse to write rows that could not be read again."""
        stored, declared = self._stored_kind(), _declared(self._world)
        if declared is not None and kind not in declared:
            raise ContractError(f"a row of the pool must be like what clients upload ({_listed(declared)}), got {kind}")
        if stored is not None and kind != stored:
            raise ContractError(f"rows of a pool must have one shape and dtype, got {kind} over {stored}")

    def committed(self, pool: Pool) -> Pool:
        """The pool after its pending rows were written."""
        if pool.pending:
            new = np.fromiter(pool.pending, dtype=np.int64)
            self._clients = np.union1d(self.clients(), new)
            self._index.changed(new, torch.stack(list(pool.pending.values())).reshape(len(new), -1))
        self._index.unstored = None
        return Pool(self)


def open_pool(reader: RunReader, own: Tensors, world: World | None = None) -> tuple[Pool, Tensors]:
    """The pool of a run file, and the server's other tensors. Version 1 kept the rows among them."""
    if reader.version >= 2:
        return Pool(StoredRows(reader, world)), own
    old = {name: row for name, row in stripped(OLD_ROWS, own).items() if name.isdecimal()}
    rest = {name: row for name, row in own.items() if name.removeprefix(OLD_ROWS) not in old}
    return Pool().with_rows(_old_rows(old, world)), rest


def _old_rows(rows: Tensors, world: World | None) -> dict[int, Tensor]:
    """Rows of version 1 by client, checked like those of today."""
    kinds = {Kind(row.dtype, tuple(row.shape)) for row in rows.values()}
    if len(kinds) > 1:
        _damaged(f"have one shape and precision with all others, got {len(kinds)} kinds")
    for kind in kinds:
        _check_kind(kind, world)
    found = {}
    for name, row in rows.items():
        if not NUMBER.fullmatch(name):
            _damaged(f"be named by the number of a client, got {name[:100]!r}")
        _check_client(int(name), world)
        found[int(name)] = _finite(row)
    return found


def _declared(world: World | None) -> set[Kind] | None:
    """The kinds of everything clients upload; None where it is unknown."""
    if world is None:
        return None
    sent = [each for when in ("start", "round") for each in world.roles.uploaded(when).values()]
    return {Kind(dtype, shape) for shape, dtype in sent if dtype in NAMES}


def _check_kind(kind: Kind, world: World | None) -> None:
    declared = _declared(world)
    if declared is not None and kind not in declared:
        _damaged(f"be like what clients of this method upload ({_listed(declared)}), got {kind}")


def _listed(kinds: set[Kind]) -> str:
    return ", ".join(sorted(map(str, kinds))) or "nothing"


def _check_client(client: int, world: World | None) -> None:
    if client < 0 or (world is not None and client >= world.clients):
        _damaged(f"be of a client in 0..{world.clients - 1 if world else ''}, got one of client {client}")


def _finite(rows: Tensor) -> Tensor:
    """The same rows, all finite. A sum is cheaper than a check of each number, and it is finite only if all of them are."""
    if not rows.sum().isfinite() and not rows.isfinite().all():
        _damaged("be finite, got NaN or infinity")
    return rows


def _damaged(rule: str) -> NoReturn:
    raise RunError(f"stored pool is damaged: a row must {rule}")
