"""The approximate index of a run's pool: built at the first request, kept up to date, and the same after a resume.

Its cells are computed again once half of the rows are newer than they are. This is checked at a request, never when rows are written, so it
depends only on the run; the centres are committed with the round in which they were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedprompt.errors import RunError
from fedprompt.modules.ann_index import Cells, Projection
from fedprompt.modules.knn import Block

LEAST = 20_000  # fewer rows are searched faster without an index
SHORTLIST = 16  # rows that are compared exactly for each row of the result
NUMBER = np.dtype("<f4")


class DatedRows(Protocol):
    """Rows with the round in which each was written."""

    def clients(self) -> np.ndarray: ...
    def dated_blocks(self) -> Iterator[tuple[Block, np.ndarray]]: ...


class PoolIndex:
    """Shortlists of near rows. The index is built, and faiss imported, at the first request."""

    def __init__(self, rows: DatedRows, stored: Callable[[], tuple[int, bytes] | None]) -> None:
        self._rows, self._stored = rows, stored
        self._projection: Projection | None = None
        self._cells: Cells | None = None
        self._newer: set[int] = set()  # clients whose rows are newer than the cells
        self.unstored: bytes | None = None  # centres that are to be committed

    def shortlists(self, own: Mapping[int, Tensor], count: int) -> dict[int, list[int]]:
        """Likely neighbours of flat rows; none in a small pool, and none where too few are found, as among many equal rows."""
        most = SHORTLIST * count
        clients = self._rows.clients()
        if not own or len(clients) < max(LEAST, 2 * most):
            return {}
        rows = torch.stack(list(own.values()))
        projection = self._project(rows.shape[1])
        points = projection.points(rows)
        near = self._ready(projection, clients).nearest(points, most + 2)  # itself, and the farthest, are left out
        found = {client: [each for each in keys if each != client] for client, keys in zip(own, near, strict=True)}
        return {client: keys for client, keys in found.items() if len(keys) >= most // 2}

    def changed(self, clients: np.ndarray, rows: Tensor) -> None:
        """Rows that were written to the pool."""
        if self._cells is not None:
            self._cells.put(clients, self._project(rows.shape[1]).points(rows))
            self._newer.update(clients.tolist())

    def _project(self, size: int) -> Projection:
        self._projection = self._projection or Projection(size)
        return self._projection

    def _ready(self, projection: Projection, clients: np.ndarray) -> Cells:
        cells = self._opened(projection) if self._cells is None else self._cells
        if 2 * len(self._newer) >= len(clients):
            cells = self._made(cells.again(clients))
        self._cells = cells
        return cells

    def _opened(self, projection: Projection) -> Cells:
        """From all rows by rising number, around the stored centres if there are any."""
        stored = self._stored()
        if stored is None:
            clients = self._rows.clients()
            points, filled = np.empty((len(clients), projection.dimensions), np.float32), 0
            for block, _ in self._rows.dated_blocks():
                points[filled : filled + len(block.keys)] = projection.points(block.rows)
                filled += len(block.keys)
            return self._made(Cells.around(clients, points))
        round, centres = stored
        cells = Cells(_centres(centres, projection.dimensions))
        for block, rounds in self._rows.dated_blocks():
            cells.put(block.keys, projection.points(block.rows))
            self._newer.update(block.keys[rounds > round].tolist())
        return cells

    def _made(self, cells: Cells) -> Cells:
        self._newer.clear()
        self.unstored = cells.centres.astype(NUMBER).tobytes()
        return cells


def _centres(blob: bytes, dimensions: int) -> np.ndarray:
    if not blob or len(blob) % (dimensions * NUMBER.itemsize):
        raise RunError(f"stored cells of the pool must have centres of {dimensions} numbers, got {len(blob)} bytes")
    centres = np.frombuffer(blob, dtype=NUMBER).reshape(-1, dimensions).astype(np.float32)
    if not np.isfinite(centres).all():
        raise RunError("stored cells of the pool must have finite centres, got NaN or infinity")
    return centres
