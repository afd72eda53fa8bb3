"""Locks on open files. The system releases them when the process ends for any reason.

POSIX has `flock`. Windows locks bytes, and no other process can read these: so one far behind any content is locked.
"""

from __future__ import annotations

import errno
import os

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

FAR = 2**30  # bytes: where Windows locks


def lock(handle: int) -> None:
    """Lock a file for this handle alone, at once; an OSError where another one has it."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    place = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        os.lseek(handle, FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(handle, place, os.SEEK_SET)


def keep_from_removal(handle: int) -> None:
    """Wait for who has locked the file, and keep it from being locked while the handle is open.

    Windows removes no open file, so nothing is needed there. An OSError where the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_SH)


def is_locked(handle: int) -> bool:
    """Whether another handle has the file locked. If not, this one has it now, until it is closed."""
    try:
        lock(handle)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise
        return True
    return False
