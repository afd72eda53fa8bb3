"""The content identity of files. Content is hashed once and remembered by path, inode, size and times: a `stat` will do.

The time of the last change of an inode is one of them, because it cannot be set back: content that changed behind the same size
and time of modification is hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from fedprompt.errors import DataError, StorageError, broken
from fedprompt.io.cache_key import CODE, code, folder_key, key_of
from fedprompt.io.files import file_sha256, write_atomically


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
        if not stat.S_ISREG(status.st_mode):  # a pipe, or a link to a device, would be read without end
            raise DataError(broken("data.source", "hold plain files", str(path)))
        identity = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        stamp.update(f"{path.resolve()}\0{identity}\n".encode())
    note = cache / "fingerprints" / stamp.hexdigest()
    key = None
    with contextlib.suppress(OSError):  # a cache that cannot be written, or trusted, only costs time
        note.parent.mkdir(parents=True, exist_ok=True)
        key = key_of(folder_key(note.parent, create=True), note.name)
        known = note.read_bytes()
        if len(known) == 64 + CODE and known[64:] == code(key, known[:64]):
            return known[:64].decode("ascii")
    value = compute()
    if key is not None:
        with contextlib.suppress(StorageError):
            write_atomically(note, value.encode() + code(key, value.encode()))
    return value


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except StorageError as error:
        raise DataError(f"data.source: {error}") from error
