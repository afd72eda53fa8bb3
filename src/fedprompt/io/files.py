"""The cache directory, checksums of files, opening a file and no link, and writing a file in one step."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

import platformdirs

from fedprompt.errors import StorageError

BINARY = getattr(os, "O_BINARY", 0)  # Windows changes line ends in what is opened without it


def cache_directory(configured: str | None = None) -> Path:
    """Where assets and features live: the configured folder, else $FEDPROMPT_CACHE, else the user cache directory."""
    chosen = configured or os.environ.get("FEDPROMPT_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("fedprompt", appauthor=False))


def file_sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror}") from error


def open_plain(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a regular file: links are not followed, and devices and pipes are refused."""
    unfollowed = getattr(os, "O_NOFOLLOW", None)
    if unfollowed is None and path.is_symlink():  # a system without the flag: the next best thing
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not hasattr(os, "O_NONBLOCK") and path.exists() and not path.is_file():  # opening a pipe would wait
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    handle = os.open(path, flags | (unfollowed or 0) | getattr(os, "O_NONBLOCK", 0) | BINARY, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return handle


def write_atomically(path: Path, data: bytes) -> None:
    """Either the whole file is there under its name, or nothing is: a reader never sees a half-written one."""
    # not `mkstemp`: a shared cache must stay readable to others; not the process number: containers share a cache, too
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some disks say only now that they are full
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror}") from error
