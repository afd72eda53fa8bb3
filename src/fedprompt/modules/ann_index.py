"""An approximate index over rows: their projections are assigned to cells, and only the nearest cells are searched.

A row of n numbers is projected to at most 256 by a fixed random matrix, which keeps distances to a few per cent. The
projections are in an inverted file of faiss (the extra `[index]`): k-means finds the centres of the cells, each row is
in the cell of its nearest centre, and a search reads a quarter of the cells. The result is a shortlist, to be compared
exactly.

A search depends on the centres and on the rows, not on the order in which rows were added. So only the centres must be
stored to build an index again, and a changed row only changes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.errors import ConfigError

DIMENSIONS = 256  # of a projection
SEED = 2410_10114
BATCH = 64  # rows that are projected together, always this number: so their bits do not depend on the other rows
ITERATIONS = 10  # of k-means
POINTS = 64  # largest number of rows per cell for k-means
PROBED = 4  # one in this number of cells is searched


def library() -> Any:
    """The module faiss, or a ConfigError where it is not installed."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise ConfigError(
            "method.search must be exact without the package faiss-cpu, got approximate: pip install 'fedprompt[index]'"
        ) from error
    return faiss


class Projection:
    """Projects rows of `size` numbers to fewer; short rows stay unchanged."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.dimensions = min(size, DIMENSIONS)

    @cached_property
    def _matrix(self) -> Tensor:
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(self._size, self.dimensions, generator=generator) / math.sqrt(self.dimensions)

    def points(self, rows: Tensor) -> np.ndarray:
        """(B, n) -> (B, p), in single precision."""
        if self.dimensions == self._size:
            return rows.float().numpy().copy()
        batches = [self._batch(part.float()) for part in rows.split(BATCH)]
        return torch.cat(batches)[: len(rows)].numpy() if batches else np.empty((0, self.dimensions), np.float32)

    def _batch(self, rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0, 0, BATCH - len(rows))) @ self._matrix


class Cells:
    """Points by key in the cells around some centres (c, p)."""

    def __init__(self, centres: np.ndarray) -> None:
        faiss, self.centres = library(), centres
        coarse = faiss.IndexFlatL2(centres.shape[1])
        coarse.add(centres)
        self._index = faiss.IndexIVFFlat(coarse, centres.shape[1], len(centres), faiss.METRIC_L2)
        self._index.is_trained = True
        self._index.set_direct_map_type(faiss.DirectMap.Hashtable)

    @classmethod
    def around(cls, keys: np.ndarray, points: np.ndarray) -> Cells:
        """New cells, twice the square root of the number of points, with new centres."""
        faiss, count = library(), max(1, min(len(points), round(2 * math.sqrt(len(points)))))
        with _one_thread():
            means = faiss.Kmeans(
                points.shape[1],
                count,
                niter=ITERATIONS,
                seed=1,
                min_points_per_centroid=1,
                max_points_per_centroid=POINTS,
            )
            means.train(points)
        cells = cls(np.asarray(means.centroids))
        cells.put(keys, points)
        return cells

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def put(self, keys: np.ndarray, points: np.ndarray) -> None:
        """Add points, or replace those of their keys."""
        with _one_thread():
            self._index.remove_ids(library().IDSelectorArray(keys.astype(np.int64)))
            self._index.add_with_ids(points, keys.astype(np.int64))

    def again(self, keys: np.ndarray) -> Cells:
        """New cells for the points of all keys."""
        return Cells.around(keys, self._index.reconstruct_batch(keys.astype(np.int64)))

    def nearest(self, points: np.ndarray, count: int) -> list[list[int]]:
        """Keys of about `count` points near to each of some points. All points at the distance of the last one are left
        out: the choice among equal ones would depend on the order in which they were added.
        """
        probes = library().SearchParametersIVF(nprobe=max(1, len(self.centres) // PROBED))
        with _one_thread():
            distances, keys = self._index.search(points, count, params=probes)
        inside = (keys >= 0) & ((distances < distances[:, -1:]) | (keys[:, -1:] < 0))
        return [row[kept].tolist() for row, kept in zip(keys, inside, strict=True)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread, for a fixed order of sums. Torch may share the setting, so it is restored."""
    faiss = library()
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
