"""What an evaluated round says of every client, read once: the pictures ask for the same rounds again and again.

A hundred thousand results are as many JSON texts; kept are two arrays and the sum of their calibration bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from fedprompt.errors import RunError
from fedprompt.run import Run


@dataclass(frozen=True, eq=False)
class Results:
    """One evaluated round."""

    clients: np.ndarray  #: numbers, rising
    accuracies: np.ndarray  #: of these clients, as fractions
    bins: (
        np.ndarray | None
    )  #: samples, summed confidence and correct answers by bin, over all clients; None without clients


_kept: WeakKeyDictionary[Run, dict[int, Results]] = WeakKeyDictionary()  # rounds that are committed never change


def results_of(run: Run, round: int) -> Results:
    kept = _kept.setdefault(run, {})
    if round not in kept:
        kept[round] = _read(run, round)
    return kept[round]


def last_results(run: Run) -> Results | None:
    """The last evaluated round; None before the first."""
    evaluated = [record.round for record in run.rounds() if record.summary is not None]
    return results_of(run, evaluated[-1]) if evaluated else None


def _read(run: Run, round: int) -> Results:
    found = run.evaluations(round)
    if len({len(result["bins"]) for result in found.values()}) > 1:
        raise RunError(f"run: {run.name}: every client must have the same number of calibration bins")
    return Results(
        np.array(sorted(found), dtype=np.int64),
        np.array([found[client]["correct"] / found[client]["samples"] for client in sorted(found)]),
        np.sum([result["bins"] for result in found.values()], axis=0) if found else None,
    )
