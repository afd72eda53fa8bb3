"""A secret of a cache folder: what is kept there counts only where its code was made with it.

Whoever can write to the folder can put files there, and so can whoever made an archive that was unpacked over it. Neither has the
secret: it is readable by its owner alone, and tied to the file it was written to, so that a copy of it is another one.
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

from fedprompt.io.files import open_plain

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
    """The code of some content, which cannot be made without the key; of what stands at a place, for this place only."""
    salt = number.to_bytes(16, "little")
    return hashlib.blake2b(content, digest_size=CODE, key=key, salt=salt).digest()


def key_of(key: bytes, name: str) -> bytes:
    """The key of one file of a folder: what was written to another one does not count in it."""
    return hashlib.blake2b(os.fsencode(name), key=key, digest_size=BYTES).digest()


def require_own(status: os.stat_result, path: Path) -> None:
    """Raise where somebody else has a folder or file and lets others write to it."""
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid() and stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(errno.EPERM, "belongs to another user, and others may write to it", str(path))


def _make(path: Path) -> None:
    """A new secret, whole or not at all; of several processes that make one, the first one's stays."""
    temporary = path.with_name(f"{NAME}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
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
        except OSError:  # a file system without links: whoever comes last wins, and rows of the others are made again
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
