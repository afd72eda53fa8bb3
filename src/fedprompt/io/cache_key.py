"""The secret key of a cache folder: a cached file counts only if its authentication code was made with this key.

A user with write access to the folder can add files, and so can the author of an archive that is unpacked there. Neither has the
secret: only its owner can read it, and it is bound to its file, so that a copy of the file is not valid.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from fedprompt.io.files import BINARY, open_plain

NAME = ".key"
BYTES = 32
CODE = 16  # bytes of a code
PATIENCE = 2.0  # seconds in which a process that makes the secret is done


def folder_key(folder: Path, create: bool) -> bytes:
    """The secret of a folder that exists, made where there is none; an OSError where it cannot be trusted."""
    require_own(os.stat(folder), folder)
    path = folder / NAME
    if create and not path.exists():
        _make(path)
    end = time.monotonic() + PATIENCE
    while True:
        handle = open_plain(path, os.O_RDONLY)
        try:
            status, secret = os.fstat(handle), os.read(handle, BYTES + 1)
        finally:
            os.close(handle)
        if len(secret) == BYTES:
            break
        if not create or time.monotonic() > end:
            raise OSError(errno.EINVAL, f"must have {BYTES} bytes", str(path))
        time.sleep(0.01)
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077):
        raise PermissionError(
            errno.EPERM, "must be readable by its owner alone, which is who uses the cache", str(path)
        )
    return hashlib.blake2b(
        str(status.st_ino).encode(), key=secret, digest_size=BYTES, person=b"fedprompt cache"
    ).digest()


def code(key: bytes, content: bytes | memoryview, number: int = 0) -> bytes:
    """The authentication code of some content, which needs the key; with a place, valid only for this place."""
    salt = number.to_bytes(16, "little")
    return hashlib.blake2b(content, digest_size=CODE, key=key, salt=salt).digest()


def key_of(key: bytes, name: str) -> bytes:
    """The key of one file of a folder: what was written to another one does not count in it."""
    return hashlib.blake2b(os.fsencode(name), key=key, digest_size=BYTES).digest()


def require_own(status: os.stat_result, path: Path) -> None:
    """Raise if a folder or file belongs to another user or is writable by others."""
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid() and stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(errno.EPERM, "belongs to another user, and others may write to it", str(path))


def _make(path: Path) -> None:
    """A new secret, whole or not at all; of several processes that make one, the first one's stays."""
    temporary = path.with_name(f"{NAME}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o600)
    try:
        try:
            os.write(handle, secrets.token_bytes(BYTES))
            os.fsync(handle)
        finally:
            os.close(handle)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except (
            OSError
        ):  # a file system without links: the last process wins, and the rows of the others are computed again
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
