"""Rows of bytes of one length, kept in a file from run to run and filled in any order."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedprompt.io.cache_key import CODE, code, folder_key, key_of, require_own
from fedprompt.io.file_locks import keep_from_removal, lock
from fedprompt.io.files import open_plain
from fedprompt.io.positioned_io import read_at, write_at

BLOCK = 4096  # bytes that a file system gives at least
STRETCH = 2**22  # bytes that are read or written at once, unless one row is longer


class RowFile:
    """A sparse file of rows, and beside it one code per row, made with the secret of the folder and written after the row.

    A row counts only when it matches its code, so a write cut short by a kill, a power cut or a full disk is never read, nor
    anything that somebody else wrote: the row is missing. Each process looks once. Two processes that fill the same row write
    the same bytes. Rows are written with `pwrite`, not through the map: on a full disk that is an error we can handle, where the
    map would kill the process. For the same reason a row is looked at through the map only after it was found good: a page that
    was never written may need room to be read.

    `problem` says why nothing can be written (any more); what is there is read all the same. While the file is open, no
    `remove_unused` of any process removes it.
    """

    def __init__(self, path: Path, rows: int, row_bytes: int) -> None:
        self.path = path
        self.problem: OSError | None = None
        self._rows, self._bytes = rows, row_bytes
        self._good = np.zeros(rows, dtype=bool)  # checked by this process
        self._lock = threading.Lock()
        self._map: np.ndarray | None = None
        self._file = self._codes = -1
        self._key = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open(os.O_RDWR | os.O_CREAT)
        except OSError as error:
            self.problem = error
            self._close()
            with suppress(OSError):
                self._open(os.O_RDONLY)

    def known(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows this process has found good before."""
        return self._good[rows]

    def holds(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows are there and whole."""
        unknown = rows[~self._good[rows]]
        if len(unknown) and self._map is not None:
            with self._lock:
                self._look_at(np.unique(unknown))
        return self._good[rows]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Rows that the file `holds`, (n, bytes) uint8, in one operation."""
        if self._map is None:
            return np.empty((0, self._bytes), dtype=np.uint8)
        return np.asarray(self._map[rows])

    def write(self, rows: np.ndarray, content: np.ndarray) -> bool:
        """Keep rows, different ones in rising order, (n, bytes) uint8; False where they cannot be written."""
        if self.problem is not None or not len(rows):
            return self.problem is None
        content = np.ascontiguousarray(content)
        codes = self._made(rows, content.data.cast("B"))
        with self._lock:
            try:
                self._put(self._file, self._bytes, rows, content)
                self._put(self._codes, CODE, rows, codes)
            except OSError as error:
                self.problem = error
                return False
            self._good[rows] = True
        return True

    def _open(self, flags: int) -> None:
        self._key = key_of(folder_key(self.path.parent, create=bool(flags & os.O_RDWR)), self.path.name)
        self._file = _held(self.path, flags)
        self._codes = open_plain(_codes_path(self.path), flags)
        for handle in (self._file, self._codes):
            require_own(os.fstat(handle), self.path)
        if flags & os.O_RDWR:  # sparse: no space is taken before it is filled
            for handle, length in ((self._file, self._rows * self._bytes), (self._codes, self._rows * CODE)):
                if os.fstat(handle).st_size != length:  # Windows leaves no mapped file another length
                    os.ftruncate(handle, length)
            with suppress(OSError):
                self.path.with_suffix(".crc").unlink()  # of an older version
        elif os.fstat(self._file).st_size != self._rows * self._bytes:
            raise OSError(f"{self.path} has another size")
        if self._rows:
            mapped = mmap.mmap(self._file, self._rows * self._bytes, access=mmap.ACCESS_READ)
            self._map = np.frombuffer(mapped, dtype=np.uint8).reshape(self._rows, self._bytes)

    def _look_at(self, rows: np.ndarray) -> None:
        """Hold rows, in rising order, against their codes. Those without one, which is 0, are not even read."""
        first = int(rows[0])
        length = CODE * (int(rows[-1]) + 1 - first)
        stored = read_at(self._codes, length, CODE * first)
        codes = np.frombuffer(stored.ljust(length, b"\0"), dtype=np.uint8).reshape(-1, CODE)
        rows = rows[codes[rows - first].any(axis=1)]
        for stretch in _stretches(rows, max(1, STRETCH // self._bytes)):
            content = read_at(self._file, len(stretch) * self._bytes, int(stretch[0]) * self._bytes)
            found = self._made(stretch, memoryview(content))
            stretch = stretch[: len(found)]
            self._good[stretch[(found == codes[stretch - first]).all(axis=1)]] = True

    def _made(self, rows: np.ndarray, content: memoryview) -> np.ndarray:
        """The codes of all rows that are whole in the content, (n, CODE)."""
        starts = range(0, len(content) - self._bytes + 1, self._bytes)
        made = [
            code(self._key, content[start : start + self._bytes], row)
            for row, start in zip(rows.tolist(), starts, strict=False)
        ]
        return np.frombuffer(b"".join(made), dtype=np.uint8).reshape(-1, CODE)

    def _put(self, handle: int, size: int, rows: np.ndarray, content: np.ndarray) -> None:
        place = 0
        for stretch in _stretches(rows, max(1, STRETCH // size)):
            write_at(handle, content[place : place + len(stretch)].data.cast("B"), int(stretch[0]) * size)
            place += len(stretch)

    def _close(self) -> None:
        for handle in (self._file, self._codes):
            if handle >= 0:
                os.close(handle)
        self._file = self._codes = -1

    def __del__(self) -> None:
        if hasattr(self, "_codes"):
            self._close()


def space(path: Path) -> int:
    """Bytes that a row file takes on the disk, with its codes."""
    total = 0
    for part in (path, _codes_path(path)):
        with suppress(OSError):
            status = part.stat()
            total += status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size
    return total


def most_space(rows: np.ndarray, row_bytes: int) -> int:
    """Bytes of disk that it can take to write rows, in rising order: blocks are taken whole."""
    total = 0
    for size in (row_bytes, CODE):
        first, last = rows * size // BLOCK, (rows * size + size - 1) // BLOCK
        shared = np.minimum(np.maximum(last[:-1] - first[1:] + 1, 0), 1) if len(rows) else rows
        total += int((last - first + 1).sum() - shared.sum()) * BLOCK
    return total


def remove_unused(path: Path) -> bool:
    """Remove a row file unless a process has it open; whether it is gone."""
    try:
        handle = open_plain(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        lock(handle)
        _codes_path(path).unlink(missing_ok=True)  # first: who makes the file anew must not find them
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _held(path: Path, flags: int) -> int:
    """A file opened such that `remove_unused` leaves it alone."""
    while True:
        handle = open_plain(path, flags)
        with suppress(OSError):  # a file system without locks: then it cannot be removed either
            keep_from_removal(handle)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # removed between the two


def _codes_path(path: Path) -> Path:
    return path.with_suffix(".mac")


def _stretches(rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Rising rows as stretches of neighbours, none longer than `most`."""
    for stretch in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        yield from (stretch[start : start + most] for start in range(0, len(stretch), most))
