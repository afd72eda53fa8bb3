"""The nodes and tensors of an ONNX file, read as data: the parts of its protobuf messages that weights need.

    message = (tag, value)*,  tag = field << 3 | wire type,  wire types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes

Written here so that the embedded backbones need no further package. Field numbers are those of `onnx.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
GRAPH = 7  # of ModelProto
NODE, INITIALIZER = 1, 5  # of GraphProto
INPUT, NAME, OP_TYPE = 1, 3, 4  # of NodeProto
DIMS, DATA_TYPE, FLOATS, INTEGERS, TENSOR_NAME, RAW, LOCATION = 1, 2, 4, 5, 8, 9, 14  # of TensorProto
KINDS = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 10: "<f2", 11: "<f8"}
LONGEST_VARINT = 10  # bytes: 64 bits, seven in each

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Node:
    """An operation of the graph."""

    op_type: str
    name: str
    inputs: tuple[str, ...]


def read_graph(data: bytes) -> tuple[list[Node], dict[str, Array]]:
    """The nodes and the stored tensors of a model. Damaged bytes are a ValueError."""
    nodes: list[Node] = []
    tensors: dict[str, Array] = {}
    for field, graph in _fields(memoryview(data)):
        for part, value in _fields(_bytes(graph)) if field == GRAPH else ():
            if part == NODE:
                nodes.append(_node(_bytes(value)))
            elif part == INITIALIZER:
                name, array = _tensor(_bytes(value))
                tensors[name] = array
    return nodes, tensors


def _node(message: memoryview) -> Node:
    found = list(_fields(message))
    words = {field: _text(value) for field, value in found if field in (NAME, OP_TYPE)}
    inputs = tuple(_text(value) for field, value in found if field == INPUT)
    return Node(words.get(OP_TYPE, ""), words.get(NAME, ""), inputs)


def _tensor(message: memoryview) -> tuple[str, Array]:
    name, kind, content, integers = "", 0, b"", list[int]()
    shape: list[int] = []
    for field, value in _fields(message):
        if field == TENSOR_NAME:
            name = _text(value)
        elif field == DATA_TYPE and isinstance(value, int):
            kind = value
        elif field in (RAW, FLOATS):  # packed floats are the bytes of an array, one alone is four bytes
            content += _bytes(value)
        elif field in (DIMS, INTEGERS):
            (shape if field == DIMS else integers).extend([value] if isinstance(value, int) else _packed(value))
        elif field == LOCATION and value:
            raise ValueError(f"tensor {name!r} must be inside the file")
    if kind not in KINDS:
        raise ValueError(f"tensor {name!r} must have a data type of {', '.join(map(str, KINDS))}, got {kind}")
    dtype = np.dtype(KINDS[kind])
    array = np.array(integers, np.uint64).astype(dtype) if integers else np.frombuffer(content, dtype)
    if len(array) != prod(shape):
        raise ValueError(f"tensor {name!r} of shape {shape} must have as many numbers, got {len(array)}")
    return name, array.reshape(shape)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers with their values: whole numbers, or bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        field, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, place = _varint(message, place)
            yield field, value
            continue
        size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(wire)
        if wire == BYTES:
            size, place = _varint(message, place)
        if size is None or place + size > len(message):
            raise ValueError("an ONNX file must be a whole protobuf message")
        yield field, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for number, byte in enumerate(message[place : place + LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, place + number + 1
    raise ValueError("an ONNX file must be a whole protobuf message")


def _packed(value: memoryview) -> Iterator[int]:
    place = 0
    while place < len(value):
        number, place = _varint(value, place)
        yield number


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("an ONNX file must have bytes where its format has them")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_bytes(value)).decode()
