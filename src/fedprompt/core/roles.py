"""Where a tensor is stored and whether it may be sent.

| role | stored | sent |
|---|---|---|
| frozen | backbone, one copy per process | never |
| shared | server and clients | down and up, aggregated |
| local | one client, kept in its state | never |
| server | server only (hypernetwork, descriptors, pool) | never, though what it generates may go down |
| stat | computed on clients (prototype sums, counts, changes) | up, not averaged by the default rule; with a declared minimum count |

A method declares its tensors once, in `Roles`; `core.wire` checks every message against that declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal

import torch

from fedprompt.errors import ContractError
from fedprompt.tensors import Tensors


@dataclass(frozen=True)
class Statistic:
    """A tensor that clients send and that is not shared: a sum over their training images, or a result that `finish` returns.

    `start` statistics are collected from every client once, before the first round; `round` statistics come with every training upload.
    With `count`, row c of this tensor was summed over `count[c]` images, and rows made from fewer than `minimum` are sent as zeros.
    """

    shape: tuple[int, ...]
    when: Literal["start", "round"] = "round"
    count: str | None = None
    minimum: int = 1
    choice: bool = False
    """It is a choice (an index, one-hot), not an amount: with noise it would be meaningless."""


@dataclass(frozen=True)
class Roles:
    """The tensors of a method at round 0, each under exactly one role. `local` holds what every client starts from."""

    shared: Tensors = field(default_factory=dict)
    local: Tensors = field(default_factory=dict)
    server: Tensors = field(default_factory=dict)
    stat: dict[str, Statistic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {role: set(getattr(self, role)) for role in ("shared", "local", "server", "stat")}
        for role, other in combinations(names, 2):
            twice = sorted(names[role] & names[other])
            if twice:
                raise ContractError(f"tensor {twice[0]!r} must have one role, got {role} and {other}")
        minima: dict[str, int] = {}
        for name, statistic in self.stat.items():
            if statistic.count is None:
                continue
            if statistic.count not in self.stat or self.stat[statistic.count].when != statistic.when:
                raise ContractError(
                    f"statistic {name!r} must name one that is sent with it as its count, got {statistic.count!r}"
                )
            if minima.setdefault(statistic.count, statistic.minimum) != statistic.minimum:
                raise ContractError(f"statistics counted by {statistic.count!r} must have one minimum, got several")

    @property
    def initial(self) -> Tensors:
        """What a client may train, as it is before the first round; a part of a server tensor goes by that tensor's name."""
        return {**self.server, **self.shared, **self.local}

    def statistics(self, when: str) -> Mapping[str, Statistic]:
        return self._statistics[when]

    def uploaded(self, when: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and precision of everything that goes up."""
        return self._uploaded[when]

    @cached_property
    def _statistics(self) -> dict[str, dict[str, Statistic]]:
        return {
            when: {name: statistic for name, statistic in self.stat.items() if statistic.when == when}
            for when in ("start", "round")
        }

    @cached_property
    def _uploaded(self) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        shared = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.shared.items()}
        counted = {
            when: {name: (statistic.shape, torch.float32) for name, statistic in found.items()}
            for when, found in self._statistics.items()
        }
        return {"start": counted["start"], "round": {**shared, **counted["round"]}}
