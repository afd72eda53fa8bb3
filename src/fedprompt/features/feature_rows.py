"""Where features are stored: rows in memory, rows in files of the cache, and the limits of both."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from fedprompt.data.cache.row_file import RowFile, most_space, remove_unused, space
from fedprompt.tensors import to_device

SUFFIX = ".rows"


class Rows(Protocol):
    """Features of some images of a source, by the numbers of the images."""

    def known(self, indices: np.ndarray) -> np.ndarray:
        """Which of the images are here, as far as this is known without reading from a disk."""

    def holds(self, indices: np.ndarray) -> np.ndarray:
        """Which of the images are here."""

    def take(self, indices: np.ndarray) -> Tensor:
        """The rows of images that are here, in one operation."""

    def put(self, indices: np.ndarray, rows: Tensor) -> None:
        """Store the rows of different images, in ascending order, as far as there is room."""

    @property
    def full(self) -> bool:
        """Whether nothing more can be stored."""


class MemoryRows:
    """Rows on the backbone's device, with room for the images it was reserved for."""

    full = False

    def __init__(self, images: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._place = np.full(images, -1, dtype=np.int64)  # of every image of the source; -1 where there is no room
        self._filled = np.zeros(images, dtype=bool)
        self._rows = torch.empty(0, *shape, dtype=dtype, device=device)
        self._row_bytes = math.prod(shape) * dtype.itemsize
        self.users: WeakSet[object] = WeakSet()

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def lacking(self, images: np.ndarray) -> int:
        """Bytes it takes to reserve room for these images too."""
        return int((self._place[images] < 0).sum()) * self._row_bytes

    def reserve(self, images: np.ndarray) -> None:
        """Make room for different images. The system allocates memory for a row only when it is filled."""
        new, old = images[self._place[images] < 0], self._rows
        if len(new):
            self._rows = old.new_empty(len(old) + len(new), *old.shape[1:])
            self._rows[: len(old)] = old
            self._place[new] = np.arange(len(old), len(self._rows))

    def known(self, indices: np.ndarray) -> np.ndarray:
        return self._filled[indices]

    holds = known

    def take(self, indices: np.ndarray) -> Tensor:
        return self._rows.index_select(0, self._places(indices))

    def put(self, indices: np.ndarray, rows: Tensor) -> None:
        room = self._place[indices] >= 0
        self._rows[self._places(indices[room])] = rows[torch.from_numpy(room)].to(self._rows)
        self._filled[indices[room]] = True

    def _places(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(self._place[indices]).to(self._rows.device)


class FileRows:
    """Rows in a file of the cache, read through a memory map. All files of its folder stay within a budget."""

    def __init__(
        self, path: Path, images: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, budget: int
    ) -> None:
        self._shape, self._dtype, self._device, self._budget = shape, dtype, device, budget
        self._row_bytes = math.prod(shape) * dtype.itemsize
        self._file = RowFile(path, images, self._row_bytes)
        self._over = False
        self.known, self.holds = self._file.known, self._file.holds
        with suppress(OSError):
            follow = os.utime not in os.supports_follow_symlinks
            os.utime(path, follow_symlinks=follow)  # those used longest ago are deleted first

    @property
    def full(self) -> bool:
        return self._over or self._file.problem is not None

    def take(self, indices: np.ndarray) -> Tensor:
        rows = torch.from_numpy(self._file.read(indices)).flatten().view(self._dtype)
        return to_device(rows.view(len(indices), *self._shape), self._device)

    def put(self, indices: np.ndarray, rows: Tensor) -> None:
        wanted = most_space(indices, self._row_bytes)
        if self.full or not make_room(self._file.path.parent, wanted, self._budget):
            self._over = True
            return
        content = rows.detach().to("cpu", self._dtype).contiguous().view(len(indices), -1).view(torch.uint8)
        self._file.write(indices, content.numpy())


def make_room(folder: Path, wanted: int, budget: int) -> bool:
    """Remove row files that no process uses, those used longest ago first, until `wanted` more bytes fit into the budget."""
    files = sorted(folder.glob(f"*{SUFFIX}"), key=_last_used)
    taken = {path: space(path) for path in files}
    total = sum(taken.values())
    for path in files:
        if total + wanted <= budget:
            break
        if remove_unused(path):
            total -= taken[path]
    return total + wanted <= budget


def _last_used(path: Path) -> int:
    """The time of the last use. A wrong clock only changes the order of deletion."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # removed by another process


class Memory:
    """The rows that this process keeps in memory. Runs of the same images and backbone share them, within a budget."""

    def __init__(self) -> None:
        self._tables: OrderedDict[str, MemoryRows] = OrderedDict()

    def rows(
        self, key: str, images: np.ndarray, budget: int, user: object, make: Callable[[], MemoryRows]
    ) -> MemoryRows | None:
        """Rows with room for these images, known by a key; None if there is no room next to those in use."""
        known = self._tables.get(key)
        rows = make() if known is None else known
        lacking = rows.lacking(images)
        stays = [table for table in (*self._tables.values(), rows) if table.users or table is rows]
        if sum({id(table): table.nbytes for table in stays}.values()) + lacking > budget:
            if known is None or known.users:
                return None
            del self._tables[key]  # made for other images; there may be room for these alone
            return self.rows(key, images, budget, user, make)
        self._tables[key] = rows
        self._tables.move_to_end(key)
        for other in [other for other, table in self._tables.items() if table not in stays]:
            if self._used() + lacking > budget:
                del self._tables[other]
        rows.reserve(images)
        rows.users.add(user)
        return rows

    def clear(self) -> None:
        self._tables.clear()

    def _used(self) -> int:
        return sum(table.nbytes for table in self._tables.values())


MEMORY = Memory()
