"""A folder for one process at a time. The system lets go of it however that process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedprompt.errors import RunError, StorageError, broken
from fedprompt.io.files import open_plain

LOCK = "lock"  # the file that is locked; it holds the number of the process


@contextmanager
def claimed(folder: Path, field: str, whose: str) -> Iterator[None]:
    """The folder, which is made where there is none; a RunError about `field` while another process of that kind has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # which no child process inherits
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise RunError(broken(field, f"be that of no other {whose} that runs", str(folder))) from None
    try:
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def claimant(folder: Path) -> int:
    """The process that has the folder, or had it last."""
    return int((folder / LOCK).read_text(encoding="ascii"))


def is_alive(process: int) -> bool:
    """Whether a process runs. One that was killed is not alive, though its parent may not have noticed yet."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # there is no /proc here, or it is somebody else's
        return True
