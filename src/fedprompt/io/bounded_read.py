"""Reading what others wrote: bounded in size and depth before anything is built from it. Free of torch and numpy.

Everything here raises a `ValueError` that names the broken rule; the caller turns it into a typed error.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, NoReturn

SMALL = 2**20  # bytes of a JSON file that people write: names, settings of a model
DEPTH = 32  # brackets inside brackets; nothing of ours has more than eight

# a string, closed or cut off, is one match, so that brackets inside it do not count and no byte is read twice
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Its reported size is not trusted: it may grow."""
    with path.open("rb") as stream:
        too_large = os.fstat(stream.fileno()).st_size > limit
        content = b"" if too_large else stream.read(limit + 1)
    if too_large or len(content) > limit:
        raise ValueError(f"must have at most {limit} bytes, got more")
    return content


def read_text(path: Path, limit: int) -> str:
    """The same as text in UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: Path, limit: int = SMALL) -> Any:
    """The value a JSON file of at most `limit` bytes holds."""
    return strict_json(read_text(path, limit))


def strict_json(text: str, finite: bool = True) -> Any:
    """JSON as its standard has it: every key once and, with `finite`, no NaN or infinity; at most `DEPTH` levels."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        mark = match[0]
        depth += (mark in "[{") - (mark in "]}")
        if depth > DEPTH:
            raise ValueError(f"must have at most {DEPTH} levels of brackets, got more")
    constants: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
    value = json.loads(text, object_pairs_hook=_each_once, **constants)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # half a character is a ValueError
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"must have every key once, got {key[:80]!r} twice")
        found[key] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"must hold finite numbers, got {constant}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse(text[:80])
    return value
