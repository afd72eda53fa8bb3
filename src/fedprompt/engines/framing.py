"""The format of messages to workers (over pipes) and to nodes (over the network).

    8 bytes   length of the header, little endian
    8 bytes   length of the tensors
    header    JSON; it refers to tensors by maps from name to place, in their order
    tensors   safetensors bytes, where the name of a tensor is its place

A tensor that many clients receive has one place, so it is sent once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from torch import Tensor

from fedprompt.core import wire
from fedprompt.io.bounded_read import strict_json
from fedprompt.tensors import Tensors

HEADER_BYTES = 2**26
TENSOR_BYTES = 2**34
MOST_MARKS = 2**20  # brackets, commas and colons in a header from elsewhere: 64 MB of them become gigabytes when read

Places = dict[str, int]


@dataclass(frozen=True)
class Frame:
    """One message."""

    header: dict[str, Any]
    tensors: bytes = b""

    def to_bytes(self) -> bytes:
        stream = io.BytesIO()
        write_frame(stream, self)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Frame:
        """Read bytes that are exactly one message; raise ValueError otherwise."""
        stream = io.BytesIO(blob)
        frame = read_frame(stream, finite=True)
        if frame is None or stream.read(1):
            raise ValueError("must be one complete frame")
        return frame


def write_frame(stream: IO[bytes], frame: Frame) -> None:
    header = json.dumps(frame.header).encode()
    _check_sizes(len(header), len(frame.tensors))
    stream.write(b"".join(len(part).to_bytes(8, "little") for part in (header, frame.tensors)) + header)
    stream.write(frame.tensors)
    stream.flush()


def read_frame(stream: IO[bytes], finite: bool = False) -> Frame | None:
    """The next message; None if the other side has closed, even in the middle of a message.

    With `finite`, a header with NaN or infinity, or with more than `MOST_MARKS` values, is a ValueError.
    """
    lengths = stream.read(16)
    if len(lengths) < 16:
        return None
    sizes = [int.from_bytes(lengths[start : start + 8], "little") for start in (0, 8)]
    _check_sizes(*sizes)
    header, tensors = (stream.read(size) for size in sizes)
    if [len(header), len(tensors)] != sizes:
        return None
    if finite and sum(map(header.count, (b"[", b"{", b",", b":"))) > MOST_MARKS:
        raise ValueError(f"header of a frame must have at most {MOST_MARKS} values")
    values = strict_json(header.decode(), finite)
    if not isinstance(values, dict):
        raise ValueError(f"header of a frame must be a mapping, got {type(values).__name__}")
    return Frame(values, tensors)


def _check_sizes(header: int, tensors: int) -> None:
    for what, size, most in (("header", header, HEADER_BYTES), ("tensors", tensors, TENSOR_BYTES)):
        if size > most:
            raise ValueError(f"{what} of a frame must have at most {most} bytes, got {size}")


class Packing:
    """Tensors to send. They are kept alive until sent, because tensors are identified by their address in memory."""

    def __init__(self) -> None:
        self._places: dict[tuple[object, ...], int] = {}
        self._tensors: list[Tensor] = []

    def put(self, tensors: Tensors) -> Places:
        return {name: self._place(tensor) for name, tensor in tensors.items()}

    def _place(self, tensor: Tensor) -> int:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._places:
            self._places[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._places[key]

    def to_bytes(self) -> bytes:
        return wire.encode({str(place): tensor for place, tensor in enumerate(self._tensors)})


class Unpacking:
    """Tensors that were received."""

    def __init__(self, blob: bytes) -> None:
        self._tensors = wire.decode(blob)

    def take(self, places: Mapping[str, int]) -> Tensors:
        return {name: self._tensors[str(place)] for name, place in places.items()}
