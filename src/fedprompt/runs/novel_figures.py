"""The figures of a base-to-novel test, as stored in a run file. Free of torch, so that tables are fast."""

from __future__ import annotations

from typing import Any

from fedprompt.runs.store import RunReader

EVENT = "base_to_novel"  # the kind of event that contains them
NOVEL_FIGURES = ("local", "base", "novel", "hm", "hm3")

NovelFigures = dict[str, Any]  # NOVEL_FIGURES over clients; classes and images of both tests; the first three by client


def stored_figures(reader: RunReader) -> NovelFigures | None:
    """The figures at the end of a run; None if it has no novel classes or is not finished."""
    return next(iter(reader.details(EVENT)), None)


def harmonic_mean(*values: float) -> float:
    """n / sum of 1/v; 0 if any value is 0."""
    return len(values) / sum(1 / value for value in values) if all(values) else 0.0
