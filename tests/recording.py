"""Looking for bytes in what was recorded: pieces of tensors and images that hardly come about by chance."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from fedprompt.tensors import Tensors

WINDOW, STEP = 24, 96  # bytes that are looked for, and how far apart: less than what SQLite cuts a value into


def windows(contents: Iterable[bytes]) -> list[bytes]:
    """Some bytes of each."""
    found = {
        content[start : start + WINDOW] for content in contents for start in range(STEP, len(content) - WINDOW, STEP)
    }
    return [window for window in found if len(set(window)) > WINDOW // 2]


def body(content: bytes) -> bytes:
    """The tensors of safetensors bytes: names and shapes are no secret."""
    return content[8 + int.from_bytes(content[:8], "little") :]


def raw(tensors: Tensors) -> Iterator[bytes]:
    for tensor in tensors.values():
        yield tensor.contiguous().numpy().tobytes()


def encoded_images(files: Iterable[Path]) -> Iterator[bytes]:
    """The images of parquet files as they are stored."""
    for file in files:
        yield from pq.read_table(file, columns=["image"])["image"].to_pylist()


def pixels(files: Iterable[Path]) -> Iterator[bytes]:
    """And as they are seen."""
    for encoded in encoded_images(files):
        yield np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB")).tobytes()
