"""One family of errors. Each class has its own exit code; each message names the field, the rule and the value.

The command line prints the message alone and exits with the code; `docs/cli.md` lists the codes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

LONGEST_VALUE = 1000  # characters of a bad value that a message shows
CLEARLY = 0.1  # by which the likeness of the nearest name exceeds that of the next, which is then not shown
MOST_COMPARED = 5000  # names that a misspelt one is compared with
_callers: list[str] = []  # whose words messages use: the command line's while one of its commands runs


class FedpromptError(Exception):
    """Anything that goes wrong in a way a user can act on."""

    exit_code = 1


class ConfigError(FedpromptError):
    """A setting is unknown, of the wrong type or out of range."""

    exit_code = 2


class DataError(FedpromptError):
    """Images, labels or a partition cannot be used as asked."""

    exit_code = 3


class BackboneError(FedpromptError):
    """Weights are missing, damaged or not the ones they should be."""

    exit_code = 4


class RunError(FedpromptError):
    """A run directory is in the way, belongs to another config or is in use."""

    exit_code = 5


class ContractError(FedpromptError):
    """A method broke its own declaration, for example by uploading a local tensor."""

    exit_code = 6


class StorageError(FedpromptError):
    """The disk is full, read-only or out of reach."""

    exit_code = 7


class DivergenceError(FedpromptError):
    """Training produced values that are not finite."""

    exit_code = 8


class QuorumError(FedpromptError):
    """Too many updates of a round were refused."""

    exit_code = 9


def named(name: str) -> type[FedpromptError] | None:
    """The error of this family that has this name, for those who hear of one from another process."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, FedpromptError) else None


@contextmanager
def command_line() -> Iterator[None]:
    """Inside, messages name the options of the command line; elsewhere the arguments of Python."""
    _callers.append("command line")
    try:
        yield
    finally:
        _callers.pop()


def argument(python: str, option: str) -> str:
    """An argument as its user writes it: `resume=True` in Python, `--resume` on the command line."""
    return option if _callers else python


def broken(field: str, rule: str, value: object) -> str:
    """The one way a bad value is reported: `federation.fraction must be in (0, 1], got 1.5`."""
    shown = repr(value)
    return f"{field} must {rule}, got {shown if len(shown) <= LONGEST_VALUE else shown[:LONGEST_VALUE] + '...'}"


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """`; did you mean 'fedvpt'?` where names are like the value, else nothing. The end of a message about an unknown name."""
    known = {plain(name): name for name in islice(names, MOST_COMPARED)}
    text = plain(str(value)[:LONGEST_VALUE])
    near = difflib.get_close_matches(text, known, n=2) or [name for name in known if len(text) > 2 and text in name][:3]
    alike = [difflib.SequenceMatcher(None, name, text).ratio() for name in near]
    if len(near) == 2 and alike[0] - alike[1] > CLEARLY:
        near = near[:1]
    return f"; did you mean {' or '.join(repr(known[name]) for name in near)}?" if near else ""


def same_name(value: str, names: Iterable[str]) -> str | None:
    """The one name that is the value, or differs from it only in case or in `-` for `_`; None without, or with several."""
    listed = list(names)
    if value in listed:
        return value
    alike = [name for name in listed if plain(name) == plain(value)]
    return alike[0] if len(alike) == 1 else None


def plain(name: str) -> str:
    """A name without case, and with one character between its words."""
    return name.casefold().replace("-", "_")
