"""A lock that gives a folder to one process. The system releases it when the process ends for any reason."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedprompt.errors import RunError, StorageError, broken
from fedprompt.io.files import open_plain

LOCK = "lock"  # the locked file; it contains the process id


@contextmanager
def claimed(folder: Path, field: str, whose: str) -> Iterator[None]:
    """Lock the folder, which is created if needed; RunError about `field` while another process holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited by child processes
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise RunError(broken(field, f"not be in use by another running {whose}", str(folder))) from None
    try:
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def claimant(folder: Path) -> int:
    """The process that holds the lock, or held it last."""
    return int((folder / LOCK).read_text(encoding="ascii"))


def is_alive(process: int) -> bool:
    """Whether a process runs. A zombie is not alive."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # there is no /proc, or the process belongs to another user
        return True
