"""The content identity of files. Content is hashed once and remembered by path, size and time: a `stat` will do."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from fedprompt.assets import file_sha256, write_atomically
from fedprompt.errors import DataError, StorageError


def of_file(path: Path, cache: Path) -> str:
    """The sha256 of a file's bytes."""
    return remembered([path], cache, lambda: _sha256(path))


def of_tree(root: Path, files: Sequence[str], cache: Path) -> str:
    """The sha256 over relative names and contents: a copy of the folder elsewhere has the same identity."""

    def compute() -> str:
        total = hashlib.sha256()
        for name in files:
            total.update(f"{name}\0{_sha256(root / name)}\n".encode())
        return total.hexdigest()

    return remembered([root / name for name in files], cache, compute)


def remembered(files: Sequence[Path], cache: Path, compute: Callable[[], str]) -> str:
    """The result of `compute` for these files, kept under the cache until one of them changes."""
    stamp = hashlib.sha256()
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"data.source: cannot read {str(path)!r}: {error.strerror}") from error
        stamp.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    note = cache / "fingerprints" / stamp.hexdigest()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known = note.read_text(encoding="ascii")
        if len(known) == 64:
            return known
    value = compute()
    with contextlib.suppress(StorageError):  # the note only saves time
        write_atomically(note, value.encode())
    return value


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except StorageError as error:
        raise DataError(f"data.source: {error}") from error
