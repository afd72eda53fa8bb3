"""One family of errors. Each class has its own exit code; each message names the field, the rule and the value.

The command line prints the message alone and exits with the code; `docs/cli.md` lists the codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_VALUE = 1000  # characters of a bad value that a message shows
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
