"""The header of safetensors bytes, checked before a single tensor is made of them. Free of torch.

Eight bytes are the length of the header (little endian), then follow the header as JSON and the body:
`{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"key": "text"}}`.

A tensor takes as many bytes as its shape and dtype say, one tensor begins where the one before it ends, and the last one
ends with the body. What is allocated afterwards is therefore never more than the bytes that are really there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, BinaryIO

from fedprompt.io.bounded_read import strict_json

MESSAGE = 2**18  # bytes of the header of a message: some two thousand tensors
FILE = 2**24  # bytes of the header of a weight file or of stored tensors
DTYPES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
DIMENSIONS = 8
_METADATA = "__metadata__"
_MOST_NUMBERS = 2**48  # of one tensor; far above any file, far below where 64 bits overflow
_ENTRY = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class Entry:
    """One tensor as the header announces it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What the bytes hold."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(stream: BinaryIO, size: int, limit: int) -> Header:
    """The header of `size` bytes that begin here; a ValueError names the broken rule. The body is not read."""
    first = stream.read(8)
    if len(first) < 8:
        raise ValueError(f"must have at least 8 bytes, got {len(first)}")
    length = int.from_bytes(first, "little")
    if length > min(limit, size - 8):
        raise ValueError(f"header must have at most {min(limit, size - 8)} bytes, got {length}")
    values = strict_json(stream.read(length).decode("utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"header must be a mapping, got {type(values).__name__}")
    metadata = _metadata(values.pop(_METADATA, {}))
    entries = {name: _entry(name, value) for name, value in values.items()}
    _check_layout(entries, size - 8 - length)
    return Header(entries, metadata)


def _metadata(values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError("metadata must map names to texts")
    return values


def _entry(name: str, values: Any) -> Entry:
    where = f"tensor {name[:80]!r}"
    if not isinstance(values, dict) or set(values) != _ENTRY:
        raise ValueError(f"{where} must have exactly {sorted(_ENTRY)}")
    dtype, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} must have a dtype of {', '.join(DTYPES)}, got {str(dtype)[:80]!r}")
    if not _counts(shape) or len(shape) > DIMENSIONS or math.prod(map(_at_least_one, shape)) > _MOST_NUMBERS:
        raise ValueError(f"{where} must have a shape of at most {DIMENSIONS} sizes and {_MOST_NUMBERS} numbers")
    if not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{where} must begin and end at whole numbers")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype]
    if end - begin != needed:
        raise ValueError(f"{where} must have the {needed} bytes of its shape and dtype, got {end - begin}")
    return Entry(dtype, tuple(shape), begin, end)


def _counts(values: Any) -> bool:
    """Whether these are whole numbers of at least 0, and none is so large that arithmetic would be slow."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _at_least_one(value: int) -> int:
    """An empty tensor has strides too: its other sizes must not overflow."""
    return max(value, 1)


def _check_layout(entries: dict[str, Entry], body: int) -> None:
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            raise ValueError(f"tensor {name[:80]!r} must begin at byte {reached}, got {entry.begin}")
        reached = entry.end
    if reached != body:
        raise ValueError(f"tensors must fill the body of {body} bytes, got {reached}")
