"""The one writer of a run, and what goes wrong with the disk it writes to."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fedprompt.errors import RunError, StorageError, broken
from fedprompt.runs.tables import DAMAGE

LOCK = "run.lock"
LOCK_PAUSE = 0.2  # seconds between two tries to become the one writer


class Lock(Protocol):
    """Held until it is let go."""

    def release(self) -> None: ...


def locked(directory: Path, patience: float = 0.0) -> Lock:
    """The lock of a run; the operating system drops it when the process dies, however it dies.

    Its file is opened as it is: a link is not followed, and nothing in it is changed.
    """
    from filelock import FileLock, Timeout  # only writers need it

    path = directory / LOCK
    with disk(directory):
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(os.lstat(path).st_mode)):
            raise RunError(broken(repr(str(path)), "be a plain file", "a link or another thing"))
        lock = FileLock(path, thread_local=False, poll_interval=LOCK_PAUSE)
        try:
            lock.acquire(timeout=patience)
        except Timeout as error:
            raise RunError(f"run: {str(directory)!r} is being written by another process") from error
    return lock


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Disk trouble becomes one clear error, and so does a damaged file; the run file keeps its last committed round."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageError(f"output.directory must be writable and have room, got {str(path)!r}: {error}") from error
    except DAMAGE as error:
        raise RunError(f"run: {str(path)!r} is not a readable run file: {error}") from error
    except OSError as error:
        raise StorageError(
            f"output.directory must be writable and have room, got {str(path)!r}: {error.strerror}"
        ) from error
