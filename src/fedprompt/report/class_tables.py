"""Balanced accuracy, macro-F1, AUROC and sensitivity: by method, by run with its domains and clients, and confusion matrices.

The figures are those of the run files. With a specificity of one's own they are computed again, from the test images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedprompt.metrics.one_against_rest import SPECIFICITY, Figures
from fedprompt.report.comparison_table import NOTHING, Cell, percent, spread
from fedprompt.report.heatmaps import MOST_NUMBERS, NAMED_COLUMNS, NAMED_ROWS
from fedprompt.report.method_grid import Column
from fedprompt.report.plot_style import new_figure, plot_style
from fedprompt.runs.class_figures import ClassFigures, class_figures
from fedprompt.runs.families import Family
from fedprompt.runs.run import Run

NAMES = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "sensitivity")
MOST_ROWS = 200  # of the table of runs


@dataclass(frozen=True)
class Found:
    """The figures of every run of a report."""

    by_run: dict[Run, list[ClassFigures]]
    specificity: float = SPECIFICITY
    again: bool = False
    """Whether the test images were predicted again."""
    titles: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        sensitivity = f"Sensitivity at {self.specificity:.4g} specificity"
        titles = ("Accuracy", "Balanced accuracy", "Macro-F1", "AUROC", sensitivity)
        object.__setattr__(self, "titles", dict(zip(NAMES, titles, strict=True)))

    @property
    def meaning(self) -> str:
        """What the tables show."""
        source = "predicted again by each client's model" if self.again else "as the run files have them"
        return (
            f"Of the last test, in per cent, {source}. Balanced accuracy: mean over classes of the share that is recognised. AUROC "
            "and sensitivity: one class against the rest, mean over classes; the threshold of a specificity is chosen on the same "
            "images. A dash: not known, such as AUROC over sites, whose predictions stay with them."
        )


def stored(runs: Sequence[Run]) -> Found:
    """What the run files have."""
    return Found({run: class_figures(run) for run in runs})


def computed(runs: Sequence[Run], specificity: float, **options: Any) -> Found:
    """The same from test images; for the options see `TrainedClient.open`."""
    return Found({run: _computed(run, specificity, options) for run in runs}, specificity, again=True)


def _computed(run: Run, specificity: float, options: dict[str, Any]) -> list[ClassFigures]:
    frame = run.metrics(specificity, **options)
    found = [
        ClassFigures(
            of, name, Figures(frame.attrs["confusion"][(of, name)].to_numpy(), row["auroc"], row["sensitivity"])
        )
        for (of, name), row in frame.iterrows()
    ]
    domains = sorted((each for each in found if each.of == "domain"), key=lambda each: each.name)
    clients = [each for each in found if each.of == "client"]
    pooled = next(each for each in found if each.of == "all")
    return [ClassFigures("all", "all images", pooled.figures), *(domains if len(domains) > 1 else ()), *clients]


def head_by_method(found: Found) -> list[str]:
    return ["Method", "Accuracy", "Balanced accuracy", "Lowest of a client", *list(found.titles.values())[2:]]


def rows_by_method(found: Found, column: Column) -> list[list[Cell]]:
    """All images together: mean and standard deviation over seeds."""
    return [_row(found, family) for family in column.families.values() if any(found.by_run[run] for run in family.runs)]


def _row(found: Found, family: Family) -> list[Cell]:
    known = [found.by_run[run] for run in family.runs if found.by_run[run]]
    accuracy, balanced, *rest = (_cell([getattr(each[0].figures, name) for each in known]) for name in NAMES)
    lowest = [min(each.figures.balanced_accuracy for each in every if each.of == "client") for every in known]
    return [Cell(family.title), accuracy, balanced, _cell(lowest), *rest]


def _cell(values: Sequence[float]) -> Cell:
    value = spread(None if math.isnan(each) else each for each in values)
    return Cell(NOTHING if value is None else percent(value))


def head_by_run(found: Found) -> list[str]:
    return ["Run", "Of", "Images", *found.titles.values()]


def rows_by_run(found: Found) -> list[list[Cell]]:
    """All images of a run, each domain and each client; those of clients as far as there is room."""
    rows = [(run, each) for run, every in found.by_run.items() for each in every]
    if len(rows) > MOST_ROWS:
        rows = [(run, each) for run, each in rows if each.of != "client"]
    return [
        [
            Cell(run.name),
            Cell(each.name if each.of == "all" else f"{each.of} {each.name}"),
            Cell(str(each.figures.images)),
            *(Cell(_percent(getattr(each.figures, name))) for name in NAMES),
        ]
        for run, each in rows[:MOST_ROWS]
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
