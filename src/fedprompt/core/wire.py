"""Tensors as bytes, and the audit of every message.

A method that breaks its own declaration is stopped here: local tensors are never sent, nor are tensors of the server,
and statistics of too few images do not leave the client.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from fedprompt.core.messages import COHORT, LocalUpdate
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ContractError, DivergenceError, RunError, broken
from fedprompt.io.bounded_read import strict_json
from fedprompt.io.safetensors_header import FILE, MESSAGE, Header, read_header
from fedprompt.tensors import Tensors

_REPLY = "fedprompt-reply-1"  # the key of the metadata with everything that is not a tensor
_FIELDS = ("client", "round", "samples", "loss")
_MOST = 10**18  # upper limit of whole numbers in a message
_CODES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bool: "BOOL"}
"""Names in the header of what `encode` writes itself, in the order in which tensors follow each other."""


def encode(tensors: Tensors) -> bytes:
    """Safetensors bytes; equal tensors give equal bytes.

    They are those of `safetensors.torch.save`, which takes ten times as long for a few small tensors.
    """
    if sys.byteorder != "little" or any(tensor.dtype not in _CODES for tensor in tensors.values()):
        return to_bytes(_for_bytes(tensors))
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for dtype, code in _CODES.items():
        for name in sorted(name for name in tensors if tensors[name].dtype == dtype):
            tensor = tensors[name].detach()
            parts.append(tensor.cpu().numpy().tobytes())
            begin, end = end, end + len(parts[-1])
            header[name] = {"dtype": code, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def decode(blob: bytes, limit: int | None = None) -> Tensors:
    """Stored tensors, by name. A RunError if the bytes are damaged or more than `limit`, before any tensor is made."""
    try:
        _, tensors = _checked(blob, limit, FILE)
    except ValueError as error:
        raise RunError(f"stored tensors are damaged: {error}") from error
    return tensors


def pack(reply: LocalUpdate) -> bytes:
    """A whole reply as one message; equal replies give equal bytes. A ContractError for one that `unpack` would refuse."""
    values = {field: getattr(reply, field) for field in _FIELDS}
    try:
        _check_values(values)
    except ValueError as error:
        raise ContractError(f"message of client {reply.client!r}: {error}") from error
    return to_bytes(_for_bytes(reply.upload), {_REPLY: json.dumps(values)})


def unpack(blob: bytes, limit: int) -> LocalUpdate:
    """The reply in a message of at most `limit` bytes.

    A ContractError says what is wrong with any other bytes, before a tensor is made of them. The guard checks that the
    reply was requested and its values are finite.
    """
    try:
        header, upload = _checked(blob, limit, MESSAGE)
        if set(header.metadata) != {_REPLY}:
            raise ValueError(broken("metadata", f"hold {_REPLY!r} alone", sorted(header.metadata)))
        values = strict_json(header.metadata[_REPLY])
        _check_values(values)
    except ValueError as error:
        raise ContractError(f"message is malformed: {error}") from error
    return LocalUpdate(upload=upload, **values)


def _check_values(values: object) -> None:
    if not isinstance(values, dict) or set(values) != set(_FIELDS):
        raise ValueError(broken("reply", f"have exactly {', '.join(_FIELDS)}", values))
    for field, least in (("client", COHORT), ("round", 0), ("samples", 0)):
        if type(values[field]) is not int or not least <= values[field] < _MOST:
            raise ValueError(broken(field, f"be a whole number of at least {least} and below {_MOST}", values[field]))
    loss = values["loss"]
    if loss is not None and not (isinstance(loss, float) and math.isfinite(loss)):
        raise ValueError(broken("loss", "be a finite number with a decimal point, or null", loss))


def _checked(blob: bytes, limit: int | None, header_limit: int) -> tuple[Header, Tensors]:
    """The header and the tensors of safetensors bytes; a ValueError names the broken rule."""
    if limit is not None and len(blob) > limit:
        raise ValueError(f"must have at most {limit} bytes, got {len(blob)}")
    header = read_header(io.BytesIO(blob), len(blob), header_limit)
    try:
        tensors = in_order(from_bytes(blob))
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise ValueError(f"tensor {name!r} must hold true or false as 1 or 0")
    return header, tensors


def _for_bytes(tensors: Tensors) -> Tensors:
    return {name: tensors[name].detach().cpu().contiguous().clone() for name in sorted(tensors)}


def require_names(tensors: Tensors, declared: Iterable[str], what: str) -> Tensors:
    """The tensors themselves if they have the declared names, else a RunError."""
    for name in sorted(set(tensors) ^ set(declared)):
        raise RunError(f"{what} must hold the tensors the method declares, but {name!r} is in one of them only")
    return tensors


def require_like(tensors: Tensors, declared: Tensors, what: str) -> Tensors:
    """The same for names, shapes and dtypes."""
    require_names(tensors, declared, what)
    for name, tensor in tensors.items():
        found, expected = (tuple(tensor.shape), tensor.dtype), (tuple(declared[name].shape), declared[name].dtype)
        if found != expected:
            raise RunError(f"{what}: tensor {name!r} must be {expected}, got {found}")
    return tensors


def in_order(tensors: Tensors) -> Tensors:
    """The same tensors by name. Safetensors returns them in any order, and a sum over tensors must not depend on it."""
    return {name: tensors[name] for name in sorted(tensors)}


def size_in_bytes(tensors: Tensors) -> int:
    """The size of the values in a message, without the few bytes of names and shapes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def audit_download(tensors: Tensors, roles: Roles, client: str) -> None:
    """Tensors with the role server or local must not be in a download under their declared names."""
    for role, names in (("server", roles.server), ("local", roles.local), ("stat", roles.stat)):
        for name in sorted(set(tensors) & set(names)):
            raise ContractError(
                f"download for client {client!r}: tensor {name!r} has role {role} and must never go down"
            )


def audit_local(tensors: Tensors, roles: Roles, client: str) -> None:
    """A client keeps exactly its declared local tensors, with finite values."""
    where = f"state of client {client!r}"
    for name in sorted(set(tensors) ^ set(roles.local)):
        raise ContractError(
            f"{where}: tensor {name!r} must be {'kept' if name in roles.local else 'declared as local'}"
        )
    for name, tensor in tensors.items():
        _check_finite(tensor, name, where)


def started_from(received: Tensors, shared: Tensors) -> Tensors:
    """The value each shared tensor had for a client before it trained: what it received under that name, else the server's."""
    return {
        name: received[name] if name in received and received[name].shape == tensor.shape else tensor
        for name, tensor in shared.items()
    }


@dataclass(frozen=True)
class Fault:
    """What is wrong with an upload: the rule as one word, and a sentence."""

    rule: str
    text: str


def find_fault(tensors: Tensors, roles: Roles, when: str = "round") -> Fault | None:
    """An upload holds exactly the declared shared tensors and statistics, with their declared shapes and finite values."""
    statistics, declared = roles.statistics(when), roles.uploaded(when)
    if tensors.keys() != declared.keys():
        odd = sorted(tensors.keys() - declared.keys())
        for role, names in (("local", roles.local), ("server", roles.server)):
            for name in [name for name in odd if name in names]:
                return Fault("keys", f"tensor {name!r} has role {role} and must never go up")
        for name in odd:
            return Fault("keys", f"tensor {name!r} was not declared as shared or stat")
    for name, (shape, dtype) in declared.items():
        if name not in tensors:
            return Fault("keys", f"declared tensor {name!r} is missing")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            return Fault("shapes", f"tensor {name!r} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype and not (name in statistics and tensor.dtype.is_floating_point):
            return Fault("dtypes", f"tensor {name!r} must have dtype {dtype}, got {tensor.dtype}")
        if not is_finite(tensor):
            return Fault("finite", f"tensor {name!r} must be finite, got NaN or infinity")
    for name, statistic in statistics.items():
        if too_small(tensors, name, statistic).any():
            return Fault("minimum", f"statistic {name!r} must hold only rows of at least {statistic.minimum} images")
    return None


def audit_upload(tensors: Tensors, roles: Roles, client: str, when: str = "round") -> None:
    """The client's own check before it sends: a method that breaks its declaration is a mistake in the method."""
    fault = find_fault(tensors, roles, when)
    if fault is not None:
        where = f"upload of client {client!r}"
        if fault.rule == "finite":
            raise DivergenceError(f"{where}: {fault.text}; try a smaller train.lr or train.lrs")
        raise ContractError(f"{where}: {fault.text}")


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. A finite sum proves it in one pass; only a sum that overflows needs a second pass."""
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())


def _check_finite(tensor: Tensor, name: str, where: str) -> None:
    if not is_finite(tensor):
        raise DivergenceError(
            f"{where}: tensor {name!r} must be finite, got NaN or infinity; try a smaller train.lr or train.lrs"
        )


def too_small(tensors: Tensors, name: str, statistic: Statistic) -> Tensor:
    """Rows of a statistic with at least one image, but fewer than the minimum."""
    if statistic.count is None:
        return torch.zeros(1, dtype=torch.bool)
    count = tensors[statistic.count]
    below = count < statistic.minimum
    rows = tensors[name].reshape(count.numel(), -1).ne(0).any(-1).reshape(count.shape)
    return below & (rows | (count > 0))


def withhold_small(tensors: Tensors, statistics: Mapping[str, Statistic]) -> Tensors:
    """Zero the rows of too few images, and their counts, before they leave the client."""
    kept = dict(tensors)
    for name, statistic in statistics.items():
        if statistic.count is not None:
            enough = tensors[statistic.count] >= statistic.minimum
            shape = (*enough.shape, *[1] * (tensors[name].dim() - enough.dim()))
            kept[name] = kept[name] * enough.reshape(shape)
            kept[statistic.count] = kept[statistic.count] * enough
    return kept
