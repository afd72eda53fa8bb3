"""Marks for the profiler: `with scope("train"):` costs nothing unless `fedprompt run --profile` measures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Measure = Callable[[str], AbstractContextManager[None]]

_measure: Measure | None = None
_nothing = nullcontext()


def scope(name: str) -> AbstractContextManager[None]:
    """A block of code that is timed under its own name. Does nothing without a profiler."""
    return _nothing if _measure is None else _measure(name)


def measure_with(measure: Measure | None) -> None:
    """Time every scope with this function from now on; None for no timing."""
    global _measure
    _measure = measure


def measuring() -> bool:
    return _measure is not None
