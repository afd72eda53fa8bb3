"""Weights out of ONNX files, which are read as data and never run. Does not import torch."""

from __future__ import annotations

import json
import struct

import numpy as np
from numpy.typing import NDArray

from fedprompt.errors import BackboneError
from fedprompt.io.onnx_graph import Array as Stored
from fedprompt.io.onnx_graph import Node, read_graph

Array = NDArray[np.float32]


def dinov2_from_onnx(data: bytes) -> bytes:
    """The safetensors bytes (DINOv2's own tensor names) of the model in an ONNX file.

    The exporter kept the names of biases, norms and scales under `model.`; it transposed the linear weights and removed
    their names, but the node that uses one still contains its module path; it merged `pos_embed[:, 0]` with the equal
    `cls_token` and stored the grid of patch positions apart.
    """
    nodes, stored = _graph(data)
    tensors = {name.removeprefix("model."): array for name, array in stored.items() if name.startswith("model.")}
    tensors.pop("mask_token", None)
    for node in nodes:
        if node.op_type == "MatMul" and node.inputs[1] in stored:
            module = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")  # blocks.0.attn.qkv
            tensors[f"{module}.weight"] = stored[node.inputs[1]].T
    cls = tensors["cls_token"]
    grids = [
        array for array in stored.values() if array.ndim == 3 and array.shape[1] > 1 and array.shape[2] == cls.shape[2]
    ]
    if len(grids) != 1:
        raise BackboneError(f"the ONNX file must hold one grid of patch positions, got {len(grids)}")
    tensors["pos_embed"] = np.concatenate([cls, grids[0]], axis=1)
    return safetensors_bytes(tensors)


def clip_image_from_onnx(data: bytes) -> bytes:
    """The safetensors bytes (names as in `transformers`) of the CLIP image tower in an ONNX file with int8 weights.

    Linear weights W (out, in) are stored transposed as integers Q (in, out) with a scale s and a zero point z for each
    output, so W = ((Q - z) s)^T; the node that multiplies by Q contains the module path. Everything else is float and
    named.

    Stored in single precision: half would change a feature by 1e-3 of its norm.
    """
    nodes, stored = _graph(data)
    tensors = {name: array for name, array in stored.items() if name.startswith("vision_model.")}
    for node in nodes:
        if node.op_type == "MatMulInteger":
            module = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")  # visual_projection
            integers, zero_point = stored[node.inputs[1]].astype(np.float32), stored[node.inputs[3]]
            scale = stored[node.inputs[1].removesuffix("_quantized") + "_scale"]
            tensors[f"{module}.weight"] = ((integers - zero_point) * scale).T
    if "visual_projection.weight" not in tensors:
        raise BackboneError("the ONNX file must hold an int8 CLIP image tower, got no visual projection")
    return safetensors_bytes(tensors)


def _graph(data: bytes) -> tuple[list[Node], dict[str, Stored]]:
    try:
        return read_graph(data)
    except ValueError as error:
        raise BackboneError(f"the ONNX file cannot be read: {error}") from error


def safetensors_bytes(tensors: dict[str, Array]) -> bytes:
    """Float32 tensors in the safetensors format, sorted by name.

    Written here because the checksum of the result is pinned: a library release must not change the header layout.
    """
    header: dict[str, dict[str, object]] = {}
    parts: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        part = np.ascontiguousarray(tensors[name], dtype="<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(part)],
        }
        parts.append(part)
        offset += len(part)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for eight-byte alignment of the data
    return struct.pack("<Q", len(text)) + text + b"".join(parts)
