"""Reading and writing at a place of an open file.

Where the system has no `pread` and `pwrite` (Windows), the position of the file moves: then threads that share a file must
take turns, as those of a `RowFile` do.
"""

from __future__ import annotations

import os


def read_at(handle: int, length: int, offset: int) -> bytes:
    """Up to this many bytes from a place."""
    if hasattr(os, "pread"):
        return os.pread(handle, length, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.read(handle, length)


def write_at(handle: int, content: memoryview, offset: int) -> None:
    """Write all of it, from a place on."""
    while content:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, content, offset)
        else:
            os.lseek(handle, offset, os.SEEK_SET)
            written = os.write(handle, content)
        content, offset = content[written:], offset + written
