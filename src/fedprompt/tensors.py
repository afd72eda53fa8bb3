"""Named tensors, the three things done with their names, and their way to a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def pick(tensors: Tensors, names: Iterable[str]) -> Tensors:
    """The named tensors, in the order of the names."""
    return {name: tensors[name] for name in names}


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def stripped(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose names begin with the prefix, without it: the inverse of `prefixed`."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device. A copy to CUDA is made from pinned memory, so that the processor goes on meanwhile."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, dtype, non_blocking=True)
    return tensor.to(device, dtype)
