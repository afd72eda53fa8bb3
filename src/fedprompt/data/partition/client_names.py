"""Names of clients. Default names are made on demand, so that a hundred thousand cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import Any, overload

PREFIX = "client_"
MOST_CLIENTS = 10**8


class NumberedNames(Sequence[str]):
    """`client_00`, `client_01`, ...: they sort like numbers."""

    def __init__(self, count: int) -> None:
        self._places = range(count)
        self._width = len(str(count - 1))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
        if isinstance(place, slice):
            return tuple(self._name(number) for number in self._places[place])
        return self._name(self._places[place])

    def __contains__(self, name: object) -> bool:
        digits = name.removeprefix(PREFIX) if isinstance(name, str) else ""
        number = int(digits) if digits.isdecimal() and digits.isascii() and len(digits) <= self._width else -1
        return number in self._places and name == self._name(number)

    def index(self, name: str, start: int = 0, stop: int | None = None) -> int:
        if name not in self:
            raise ValueError(f"{name!r} is none of {len(self)} numbered clients")
        return self._places.index(int(name.removeprefix(PREFIX)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedNames):
            return len(self) == len(other)
        return isinstance(other, list | tuple) and len(self) == len(other) and all(map(eq, self, other))

    def _name(self, number: int) -> str:
        return f"{PREFIX}{number:0{self._width}d}"


def compact(names: list[str]) -> Sequence[str]:
    """The same names; numbered ones without a text for each."""
    numbered = NumberedNames(len(names))
    return numbered if numbered == names else tuple(names)


def as_fact(names: Sequence[str]) -> Any:
    """Names as a run file keeps them."""
    return {"numbered": len(names)} if isinstance(names, NumberedNames) else list(names)


def from_fact(fact: Any) -> Sequence[str]:
    """The names in a run file; older files always hold a list. A ValueError for anything else."""
    if isinstance(fact, list) and all(isinstance(name, str) for name in fact):
        return fact
    count = fact.get("numbered") if isinstance(fact, dict) else None
    if type(count) is not int or not 0 < count <= MOST_CLIENTS:
        raise ValueError(f"must be a list of names, or their number up to {MOST_CLIENTS}")
    return NumberedNames(count)
