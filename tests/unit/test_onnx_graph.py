"""The reader of ONNX files against the library that defines them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, strategies
from onnx import TensorProto, helper, numpy_helper

from fedprompt.io.onnx_graph import Node, read_graph

pytestmark = pytest.mark.unit

ARRAYS = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5,
    "halves": np.array([1.5, -2], np.float16),
    "bytes": np.array([0, 255], np.uint8),
    "signed": np.array([[-128, 127]], np.int8),
    "indices": np.array([-1, 2**40], np.int64),
    "nothing": np.zeros((0, 4), np.float32),
}


def model(stored: list[TensorProto]) -> bytes:
    nodes = [
        helper.make_node("MatMul", ["x", "floats"], ["y"], name="/attn/qkv/MatMul"),
        helper.make_node("Neg", ["y"], ["z"]),
    ]
    return helper.make_model(helper.make_graph(nodes, "tower", [], [], stored)).SerializeToString()


def test_nodes_and_tensors_are_those_that_the_library_wrote() -> None:
    nodes, tensors = read_graph(model([numpy_helper.from_array(array, name) for name, array in ARRAYS.items()]))
    assert nodes == [Node("MatMul", "/attn/qkv/MatMul", ("x", "floats")), Node("Neg", "", ("y",))]
    assert list(tensors) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name], array)


def test_values_that_are_not_raw_bytes_are_read_too() -> None:
    floats = helper.make_tensor("floats", TensorProto.FLOAT, [3], [0.5, -1, 2])
    signed = helper.make_tensor("signed", TensorProto.INT8, [2], [-5, 100])
    _, tensors = read_graph(model([floats, signed]))
    assert tensors["floats"].tolist() == [0.5, -1, 2]
    assert tensors["signed"].tolist() == [-5, 100]
    assert tensors["signed"].dtype == np.int8


def test_a_tensor_of_another_size_or_elsewhere_is_refused() -> None:
    short = numpy_helper.from_array(ARRAYS["floats"], "w")
    short.dims[0] = 200
    with pytest.raises(ValueError, match=r"tensor 'w' of shape \[200, 3\] must have as many numbers, got 6"):
        read_graph(model([short]))
    words = helper.make_tensor("w", TensorProto.STRING, [1], [b"word"])
    with pytest.raises(ValueError, match="tensor 'w' must have a data type of"):
        read_graph(model([words]))
    outside = numpy_helper.from_array(ARRAYS["floats"], "w")
    outside.data_location = TensorProto.EXTERNAL
    with pytest.raises(ValueError, match="tensor 'w' must be inside the file"):
        read_graph(model([outside]))


WHOLE = model([numpy_helper.from_array(ARRAYS["floats"], "floats")])


@given(strategies.integers(0, len(WHOLE) - 1), strategies.integers(0, 255))
def test_changed_bytes_are_read_or_refused(place: int, value: int) -> None:
    with contextlib.suppress(ValueError):
        read_graph(WHOLE[:place] + bytes([value]) + WHOLE[place + 1 :])


@given(strategies.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_graph(data)
