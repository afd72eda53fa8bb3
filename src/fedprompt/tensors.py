"""Named tensors, and the three things done with their names."""

from __future__ import annotations

from collections.abc import Iterable

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
