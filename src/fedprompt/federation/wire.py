"""Tensors as bytes, and the audit that every message passes.

A method that breaks its own declaration is stopped here: what is local stays local, what is the server's stays there,
and statistics made from too few images do not leave the client.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from fedprompt.errors import ContractError, DivergenceError, RunError
from fedprompt.roles import Roles, Statistic, Tensors


def encode(tensors: Tensors) -> bytes:
    """Safetensors bytes; equal tensors give equal bytes."""
    return to_bytes({name: tensors[name].detach().cpu().contiguous().clone() for name in sorted(tensors)})


def decode(blob: bytes) -> Tensors:
    try:
        return in_order(from_bytes(blob))
    except SafetensorError as error:
        raise RunError(f"stored tensors are damaged: {error}") from error


def in_order(tensors: Tensors) -> Tensors:
    """The same tensors by name. Safetensors gives them back in any order, and a sum over tensors must not depend on it."""
    return {name: tensors[name] for name in sorted(tensors)}


def size_in_bytes(tensors: Tensors) -> int:
    """What the values weigh on the wire, without the few bytes of names and shapes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def audit_download(tensors: Tensors, roles: Roles, client: str) -> None:
    """Nothing that is the server's own or some client's own may go down under its declared name."""
    for role, names in (("server", roles.server), ("local", roles.local), ("stat", roles.stat)):
        for name in sorted(set(tensors) & set(names)):
            raise ContractError(
                f"download for client {client!r}: tensor {name!r} has role {role} and must never go down"
            )


def audit_local(tensors: Tensors, roles: Roles, client: str) -> None:
    """A client keeps exactly its declared local tensors, and finite ones."""
    where = f"state of client {client!r}"
    for name in sorted(set(tensors) ^ set(roles.local)):
        raise ContractError(
            f"{where}: tensor {name!r} must be {'kept' if name in roles.local else 'declared as local'}"
        )
    for name, tensor in tensors.items():
        _check_finite(tensor, name, where)


def audit_upload(tensors: Tensors, roles: Roles, client: str, when: str = "round") -> None:
    """An upload holds exactly the declared shared tensors and statistics, with their declared shapes and finite values."""
    where = f"upload of client {client!r}"
    for role, names in (("local", roles.local), ("server", roles.server)):
        for name in sorted(set(tensors) & set(names)):
            raise ContractError(f"{where}: tensor {name!r} has role {role} and must never go up")
    statistics = roles.statistics(when)
    shared: Mapping[str, Tensor] = roles.shared if when == "round" else {}
    declared = {
        **{name: tuple(tensor.shape) for name, tensor in shared.items()},
        **{n: s.shape for n, s in statistics.items()},
    }
    for name in sorted(set(tensors) - set(declared)):
        raise ContractError(f"{where}: tensor {name!r} was not declared as shared or stat")
    for name, shape in declared.items():
        if name not in tensors:
            raise ContractError(f"{where}: declared tensor {name!r} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ContractError(f"{where}: tensor {name!r} must have shape {shape}, got {tuple(tensors[name].shape)}")
        if name in shared and tensors[name].dtype != shared[name].dtype:
            raise ContractError(
                f"{where}: tensor {name!r} must have dtype {shared[name].dtype}, got {tensors[name].dtype}"
            )
        _check_finite(tensors[name], name, where)
    for name, statistic in statistics.items():
        if too_small(tensors, name, statistic).any():
            raise ContractError(
                f"{where}: statistic {name!r} must hold only rows of at least {statistic.minimum} images"
            )


def _check_finite(tensor: Tensor, name: str, where: str) -> None:
    if not torch.isfinite(tensor).all():
        raise DivergenceError(
            f"{where}: tensor {name!r} must be finite, got NaN or infinity; try a smaller train.lr or train.lrs"
        )


def too_small(tensors: Tensors, name: str, statistic: Statistic) -> Tensor:
    """Rows of a statistic that were made from some, but fewer than the minimum number of images."""
    if statistic.count is None:
        return torch.zeros(1, dtype=torch.bool)
    count = tensors[statistic.count]
    below = count < statistic.minimum
    rows = tensors[name].reshape(count.numel(), -1).ne(0).any(-1).reshape(count.shape)
    return below & (rows | (count > 0))


def withhold_small(tensors: Tensors, statistics: Mapping[str, Statistic]) -> Tensors:
    """Zero the rows that too few images went into, before they leave the client. The counts themselves are zeroed there too."""
    kept = dict(tensors)
    for name, statistic in statistics.items():
        if statistic.count is not None:
            enough = tensors[statistic.count] >= statistic.minimum
            shape = (*enough.shape, *[1] * (tensors[name].dim() - enough.dim()))
            kept[name] = kept[name] * enough.reshape(shape)
            kept[statistic.count] = kept[statistic.count] * enough
    return kept
