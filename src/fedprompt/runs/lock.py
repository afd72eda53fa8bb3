"""The lock that allows a single writer of a run, and errors of the disk."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fedprompt.errors import RunError, StorageError, broken
from fedprompt.runs.tables import DAMAGE, FILE

LOCK = "run.lock"
LOCK_PAUSE = 0.2  # seconds between two attempts to get the lock


class Lock(Protocol):
    """Held until it is released."""

    def release(self) -> None: ...


def locked(directory: Path, patience: float = 0.0) -> Lock:
    """The lock of a run; the operating system releases it when the process dies for any reason.

    Its file is opened without following links, and its content is not changed.
    """
    from filelock import FileLock, Timeout  # only writers need it

    path = directory / LOCK
    with disk(directory):
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(os.lstat(path).st_mode)):
            raise RunError(broken(repr(str(path)), "be a plain file", "a link or another kind of file"))
        lock = FileLock(path, thread_local=False, poll_interval=LOCK_PAUSE)
        try:
            lock.acquire(timeout=patience)
        except Timeout as error:
            raise RunError(f"run: {str(directory)!r} is being written by another process") from error
    return lock


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turn disk errors and damaged files into one clear error; the run file keeps its last committed round."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageError(f"output.directory must be writable and have room, got {str(path)!r}: {error}") from error
    except DAMAGE as error:
        file = path if path.suffix == ".db" else path / FILE
        raise RunError(f"run: {str(file)!r} is not a readable run file: {error}") from error
    except OSError as error:
        raise StorageError(
            f"output.directory must be writable and have room, got {str(path)!r}: {error.strerror}"
        ) from error
