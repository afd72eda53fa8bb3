"""Figures by class of a run's last test, as its file has them: no image is needed. Free of torch.

Counts by label and prediction are stored for every client and domain, so their sums are exact. AUROC and sensitivity cannot be
summed: they are computed when all predictions are there, which those of sites never are. `Run.metrics` computes all of them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedprompt.metrics.one_against_rest import RANKED, Figures
from fedprompt.runs.run import Run


@dataclass(frozen=True)
class ClassFigures:
    """The figures of one client, of one domain, or of all images."""

    of: str
    """`client`, `domain` or `all`."""
    name: str
    figures: Figures


def class_figures(run: Run) -> list[ClassFigures]:
    """All images, then domains where there are several, then clients; empty where the run file has no such figures."""
    tested = last_test(run)
    classes = [str(name) for name in run.reader.fact("classes") or []]
    cells = {client: result.get("confusion") for client, result in tested.items()}
    if not tested or not classes or None in cells.values():
        return []
    domains = sorted({cell[0] for own in cells.values() for cell in own or ()})
    everything = [cell for own in cells.values() for cell in own or ()]
    summary = _last_summary(run)
    found = [ClassFigures("all", "all images", _counted(everything, len(classes), summary.get("ranked")))]
    for domain in domains if len(domains) > 1 else ():
        inside = [cell for cell in everything if cell[0] == domain]
        found.append(ClassFigures("domain", domain, _counted(inside, len(classes), _of_domain(summary, domain))))
    for client, own in cells.items():
        figures = _counted(own or [], len(classes), tested[client])
        found.append(ClassFigures("client", run.clients[client], figures))
    return found


def last_test(run: Run) -> dict[int, dict[str, Any]]:
    """The results of the final test where there is one, else of the last evaluated round."""
    if run.final_test is not None:
        return run.final_results()
    evaluated = [record.round for record in run.rounds() if record.summary is not None]
    return run.evaluations(evaluated[-1]) if evaluated else {}


def _last_summary(run: Run) -> dict[str, Any]:
    history = run.history()
    if run.final_test is not None:
        return run.final_test.summary
    return history[-1] if history else {}


def _of_domain(summary: Mapping[str, Any], domain: str) -> dict[str, Any]:
    """AUROC and sensitivity of a domain, as far as they are known."""
    return {name: summary.get(f"{name}_by_domain", {}).get(domain, math.nan) for name in RANKED}


def _counted(cells: Iterable[list[Any]], classes: int, result: Mapping[str, Any] | None = None) -> Figures:
    confusion = np.zeros((classes, classes), dtype=np.int64)
    for _, label, predicted, count in cells:
        if max(label, predicted) < classes:
            confusion[label, predicted] += count
    ranked = [math.nan if result is None else float(result.get(name, math.nan)) for name in RANKED]
    return Figures(confusion, *ranked)
