"""The figures of a base-to-novel test, as a run file keeps them. Knows no torch, so that tables are instant."""

from __future__ import annotations

from typing import Any

from fedprompt.runs.store import RunReader

EVENT = "base_to_novel"  # the kind of entry that holds them
NOVEL_FIGURES = ("local", "base", "novel", "hm", "hm3")

NovelFigures = dict[str, Any]  # NOVEL_FIGURES over clients; classes and images of both tests; the first three by client


def stored_figures(reader: RunReader) -> NovelFigures | None:
    """What a run found at its end; None where novel classes were not asked for, or the end is not reached."""
    return next(iter(reader.details(EVENT)), None)


def harmonic_mean(*values: float) -> float:
    """n / sum of 1/v; nought as soon as one value is."""
    return len(values) / sum(1 / value for value in values) if all(values) else 0.0
