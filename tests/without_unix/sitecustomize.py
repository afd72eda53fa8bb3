"""Python without what Windows lacks, for `make test-without-unix`: a folder on PYTHONPATH, so that child processes have it too.

Modules of fedprompt see no `fcntl`, none of the functions below, and a `msvcrt` that locks as Windows does, but for that it
locks whole files. Owners and modes of files stay: what protects by them cannot be had on Windows. Other packages see the
system as it is.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import sys
from types import ModuleType
from typing import Any

HIDDEN_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "posix"}
HIDDEN = {"pread", "pwrite", "preadv", "sysconf", "getpgid", "killpg", "fork", "uname"}
HIDDEN |= {"O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "sched_getaffinity", "posix_fallocate", "fchmod", "waitid"}
_import = builtins.__import__


class WindowsOs(ModuleType):
    """The module os as fedprompt sees it."""

    def __getattr__(self, name: str) -> Any:
        if name in HIDDEN:
            raise AttributeError(f"module 'os' has no attribute {name!r} (hidden by tests/without_unix)")
        return getattr(os, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(os, name, value)

    def kill(self, process: int, number: int) -> None:
        if number == 0:
            raise AssertionError("os.kill(process, 0) ends the process on Windows")
        os.kill(process, number)


def locking(handle: int, mode: int, length: int) -> None:
    """`msvcrt.locking`: an OSError with EACCES where another handle has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_UN if mode == 0 else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OSError(errno.EACCES, "Permission denied") from error


SEEN_OS = WindowsOs("os")
MSVCRT = ModuleType("msvcrt")
vars(MSVCRT).update(locking=locking, LK_UNLCK=0, LK_NBLCK=2)


def without_unix(name: str, globals: Any = None, *others: Any, **more: Any) -> Any:
    if globals and str(globals.get("__name__", "")).split(".")[0] == "fedprompt":
        if name in HIDDEN_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by tests/without_unix)", name=name)
        if name == "os":
            return SEEN_OS
        if name == "msvcrt":
            return MSVCRT
    return _import(name, globals, *others, **more)


if os.environ.get("WITHOUT_UNIX") and sys.platform != "win32":
    builtins.__import__ = without_unix
