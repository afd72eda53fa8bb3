"""Where learned maps begin."""

from __future__ import annotations

from torch import Tensor

from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


def uniform(size: tuple[int, ...], fan_in: int, generator: Stream) -> Tensor:
    """A linear layer's usual start: uniform in ±1/sqrt(fan-in)."""
    return (2 * generator.uniform(*size) - 1) / fan_in**0.5


def linear_layer(name: str, rows: int, columns: int, generator: Stream, stacked: tuple[int, ...] = ()) -> Tensors:
    """Weight (rows, columns) and bias (rows,) of a layer, or of several stacked ones, at that start."""
    return {
        f"{name}.weight": uniform((*stacked, rows, columns), columns, generator),
        f"{name}.bias": uniform((*stacked, rows), columns, generator),
    }
