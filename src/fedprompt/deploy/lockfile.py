"""A lock that gives a folder to one process. The system releases it when the process ends for any reason."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedprompt.errors import RunError, StorageError, broken
from fedprompt.io.file_locks import is_locked
from fedprompt.io.files import open_plain

LOCK = "lock"  # the locked file; it contains the process id
LOOKS = 3  # attempts to take the lock
LOOK = 0.05  # seconds between two of them


@contextmanager
def claimed(folder: Path, field: str, whose: str) -> Iterator[None]:
    """Lock the folder, which is created if needed; RunError about `field` while another process holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited by child processes
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    try:
        if not _taken(handle):
            raise RunError(broken(field, f"not be in use by another running {whose}", str(folder)))
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    """Take the lock; a process that only looks at it has it for a moment."""
    for attempt in range(LOOKS):
        time.sleep(LOOK * bool(attempt))
        try:
            if not is_locked(handle):
                return True
        except OSError as error:
            raise StorageError(f"the file system must have locks: {error.strerror}") from error
    return False


def claimant(folder: Path) -> int:
    """The process that holds the lock, or held it last."""
    return int((folder / LOCK).read_text(encoding="ascii"))


def still_claimed(folder: Path, process: int) -> bool:
    """Whether this process holds the lock. One that has ended does not, even before its parent has asked for it."""
    try:
        handle = open_plain(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return claimant(folder) == process and is_locked(handle)
    except ValueError:  # another process is just writing its number
        return False
    finally:
        os.close(handle)
