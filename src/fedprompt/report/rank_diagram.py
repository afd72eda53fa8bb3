"""The critical-difference diagram (Demsar, 2006): mean ranks over several tasks, and which of them are level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fedprompt.metrics.significance import Ranking, rank_over_tasks
from fedprompt.report.method_grid import Arrangement
from fedprompt.report.plot_style import INK, colour, marker, new_figure, plot_style

LEAST_TASKS = 3
LEAST_METHODS = 3  # two have a sign test


@dataclass(frozen=True)
class RankedMethods:
    """Methods that were tested on every task."""

    labels: tuple[str, ...]
    numbers: tuple[int, ...]
    """Their row numbers, which give their colours."""
    ranking: Ranking
    left_out: tuple[str, ...]
    """Methods without a finished run on some task."""

    @property
    def sentence(self) -> str:
        equal = self.ranking.p > 0.05
        found = "does not tell them apart" if equal else "tells them apart"
        text = (
            f"{len(self.labels)} methods on {self.ranking.tasks} tasks, ranked by Average in each task, 1 is the best. Friedman's "
            f"test {found} (p = {self.ranking.p:.2g}). Methods joined by a bar are level: their mean ranks differ by less than the "
            f"critical difference of {self.ranking.critical:.2f} (Nemenyi, 95 %). Tasks count as independent, which settings of one "
            "data set are not."
        )
        return text + (f" Left out, not finished on every task: {', '.join(self.left_out)}." if self.left_out else "")

    @property
    def caption(self) -> str:
        order = np.argsort(self.ranking.ranks, kind="stable")
        ranks = ", ".join(f"{self.labels[place]} {self.ranking.ranks[place]:.2f}" for place in order)
        return f"Mean ranks over {self.ranking.tasks} tasks: {ranks}. Critical difference {self.ranking.critical:.2f}."


def ranked_methods(arranged: Arrangement) -> RankedMethods | None:
    """The ranks of the methods with a finished row in every column; None with too few methods or tasks."""
    if len(arranged.columns) < LEAST_TASKS:
        return None
    scores: dict[int, list[float]] = {}
    for rows in arranged.rows:
        for number, row in rows.items():
            value = row.values["average"]
            if row.finished and value is not None and math.isfinite(value.mean):
                scores.setdefault(number, []).append(round(value.mean, 4))  # as printed: those are equal
    complete = sorted(number for number, found in scores.items() if len(found) == len(arranged.columns))
    if len(complete) < LEAST_METHODS:
        return None
    ranking = rank_over_tasks(np.array([scores[number] for number in complete]).T)
    left_out = [label for number, label in enumerate(arranged.labels) if number not in complete]
    labels = tuple(arranged.labels[number] for number in complete)
    return RankedMethods(labels, tuple(complete), ranking, tuple(left_out))


def level_groups(ranks: Sequence[float], critical: float) -> list[tuple[float, float]]:
    """The longest spans of ranks, from the best on, within which no two differ by the critical difference."""
    ordered = sorted(ranks)
    spans: list[tuple[float, float]] = []
    for low in ordered:
        high = max(rank for rank in ordered if rank - low < critical)
        if high > low and (not spans or high > spans[-1][1]):
            spans.append((low, high))
    return spans


def rank_picture(found: RankedMethods) -> Figure:
    """Methods from the best rank down, each with its mark; bars at the top join those that are level."""
    ranks = found.ranking.ranks
    order = sorted(range(len(ranks)), key=lambda place: ranks[place])
    spans = level_groups(ranks, found.ranking.critical)
    with plot_style():
        figure = new_figure(height=1.3 + 0.3 * (len(ranks) + len(spans)))
        axes = figure.add_subplot()
        for line, (low, high) in enumerate(spans):
            axes.plot([low, high], [-1 - line, -1 - line], color=INK, linewidth=4, solid_capstyle="butt")
        for line, place in enumerate(order):
            number = found.numbers[place]
            axes.plot([1, ranks[place]], [line, line], color=colour(number), linewidth=1)
            axes.plot(ranks[place], line, color=colour(number), marker=marker(number), markersize=8)
        axes.set(xlim=(0.8, len(ranks) + 0.2), ylim=(len(ranks) - 0.5, -0.6 - len(spans)))
        axes.set_yticks(range(len(order)), [found.labels[place] for place in order])
        axes.set_xticks(range(1, len(ranks) + 1))
        axes.grid(False, axis="y")
        axes.set(title="Ranks over tasks", xlabel=f"Mean rank; critical difference {found.ranking.critical:.2f}")
    return figure
