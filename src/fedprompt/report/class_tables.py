"""Balanced accuracy, macro-F1, AUROC and sensitivity as tables, and the confusion matrix as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedprompt.metrics.one_against_rest import SPECIFICITY
from fedprompt.report.comparison_table import NOTHING, Cell
from fedprompt.report.heatmaps import MOST_NUMBERS, NAMED_COLUMNS, NAMED_ROWS
from fedprompt.report.plot_style import new_figure, plot_style
from fedprompt.runs.class_figures import ClassFigures, class_figures
from fedprompt.runs.run import Run

TITLES = {
    "accuracy": "Accuracy",
    "balanced_accuracy": "Balanced accuracy",
    "macro_f1": "Macro-F1",
    "auroc": "AUROC",
    "sensitivity": f"Sensitivity at {SPECIFICITY:.0%} specificity",
}
HEAD = ["Run", "Of", "Images", *TITLES.values()]
MOST_ROWS = 200  # of the table


def rows(runs: Sequence[Run]) -> list[list[Cell]]:
    """One row for all images of a run, each domain and each client, in per cent; those of clients as far as there is room."""
    found = [(run, each) for run in runs for each in class_figures(run)]
    if len(found) > MOST_ROWS:
        found = [(run, each) for run, each in found if each.of != "client"]
    return [
        [
            Cell(run.name),
            Cell(each.name if each.of == "all" else f"{each.of} {each.name}"),
            Cell(str(each.figures.images)),
            *(Cell(_percent(getattr(each.figures, key))) for key in TITLES),
        ]
        for run, each in found[:MOST_ROWS]
    ]


def _percent(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{100 * value:.1f}"


def confusion_picture(run: Run, pooled: ClassFigures) -> Figure:
    """Shares of the images of every class by prediction, with counts where there is room."""
    counts = pooled.figures.confusion
    names = [str(name) for name in run.reader.fact("classes") or []]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    with plot_style():
        side = min(7.0, 2.2 + 0.28 * len(names))
        figure = new_figure(side + 0.6, side)
        axes = figure.add_subplot()
        axes.imshow(100 * shares, vmin=0, vmax=100, cmap="Blues", aspect="auto")
        axes.set(title=run.name, xlabel="Predicted", ylabel="Class")
        axes.grid(False)
        if len(names) <= NAMED_COLUMNS:
            axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
        if len(names) <= NAMED_ROWS:
            axes.set_yticks(range(len(names)), names)
        if counts.size <= MOST_NUMBERS:
            for row, column in np.argwhere(counts):
                colour = "white" if shares[row, column] > 0.6 else "black"
                axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=colour, fontsize=7)
    return figure
