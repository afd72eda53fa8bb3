"""The results of every client in an evaluated round, read once: several plots use the same rounds.

A hundred thousand results are as many JSON texts; only two arrays and the sum of their calibration bins are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fedprompt.errors import RunError
from fedprompt.runs.run import Run


@dataclass(frozen=True, eq=False)
class Results:
    """One evaluated round."""

    clients: np.ndarray
    """Numbers, rising."""
    accuracies: np.ndarray
    """Of these clients, as fractions."""
    bins: np.ndarray | None
    """Samples, summed confidence and correct answers by bin, over all clients; None without clients."""


def accuracy_title(runs: Iterable[Run], last: bool = False) -> str:
    """What an axis of accuracies is called: by round, or (`last`) where the final test counts if there was one."""
    kinds = {"test" if last and run.final_test is not None else run.config.federation.evaluate_on for run in runs}
    if kinds == {"test"} or not kinds:
        return "Accuracy"
    return "Accuracy on validation images" if kinds == {"validation"} else "Accuracy, of some on validation images"


_kept: WeakKeyDictionary[Run, dict[int, Results]] = WeakKeyDictionary()  # rounds that are committed never change


def results_of(run: Run, round: int) -> Results:
    kept = _kept.setdefault(run, {})
    if round not in kept:
        kept[round] = _summed(run, run.evaluations(round))
    return kept[round]


def last_results(run: Run) -> Results | None:
    """The final test where there is one, else the last evaluated round; None before the first."""
    if run.final_test is not None:
        return _summed(run, run.final_results())
    evaluated = [record.round for record in run.rounds() if record.summary is not None]
    return results_of(run, evaluated[-1]) if evaluated else None


def _summed(run: Run, found: Mapping[int, dict[str, Any]]) -> Results:
    bins = [result["bins"] for result in found.values() if result["bins"]]  # a site may keep them to itself
    if len({len(each) for each in bins}) > 1:
        raise RunError(f"run: {run.name}: every client must have the same number of calibration bins")
    return Results(
        np.array(sorted(found), dtype=np.int64),
        np.array([found[client]["correct"] / found[client]["samples"] for client in sorted(found)]),
        np.sum(bins, axis=0) if bins else None,
    )
