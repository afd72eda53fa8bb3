"""Heat maps with a row for every client: its accuracy by round, and its images by class.

Both stay readable with a hundred thousand clients: accuracies are then means over clients of neighbouring rank. Of a
partition only some clients are shown, because a mean over many would look even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import fill

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedprompt.data.partition import class_counts
from fedprompt.errors import RunError
from fedprompt.report import evaluated_rounds
from fedprompt.report.plot_style import new_figure, plot_style
from fedprompt.report.plots import add_place, thin
from fedprompt.runs.run import Run

MOST_ROWS = 60  # of clients that are drawn one by one
NAMED_ROWS, NAMED_COLUMNS = 30, 15  # largest number of names next to them
MOST_NUMBERS = 160  # largest number of cells with printed counts
LONGEST = 22  # characters of a name next to an axis


@dataclass(frozen=True)
class Accuracies:
    """Accuracies in per cent, (rows, evaluated rounds); NaN if a client was not tested."""

    @property
    def one_value(self) -> float | None:
        """The accuracy of all cells, where it is one: such a map has one colour."""
        known = np.unique(self.table[~np.isnan(self.table)].round(2))
        return float(known[0]) if len(known) == 1 else None

    table: np.ndarray
    rows: list[str]
    rounds: list[int]
    grouped: bool
    """a row is the mean over several clients."""


def client_accuracies(run: Run) -> Accuracies:
    """One row for every client that was tested, or for clients of neighbouring rank if there are too many."""
    rounds = [entry["round"] for entry in run.history()]
    found = [evaluated_rounds.results_of(run, round) for round in rounds]
    tested = np.unique(np.concatenate([each.clients for each in found])) if found else np.array([], dtype=np.int64)
    table = np.full((len(tested), len(rounds)), np.nan)  # with held-out clients, only those
    for column, each in enumerate(found):
        table[np.searchsorted(tested, each.clients), column] = 100 * each.accuracies
    if len(tested) <= MOST_ROWS:
        return Accuracies(table, [run.clients[client] for client in tested.tolist()], rounds, grouped=False)
    ranked = table[np.argsort(_latest(table), kind="stable")]
    bounds = np.linspace(0, len(ranked), MOST_ROWS + 1).astype(int)
    parts = [ranked[start:stop] for start, stop in pairwise(bounds)]
    names = [f"{start + 1} to {stop}" for start, stop in pairwise(bounds)]
    return Accuracies(np.array([_known_mean(part) for part in parts]), names, rounds, grouped=True)


def _latest(table: np.ndarray) -> np.ndarray:
    """The last known accuracy of every client."""
    latest = np.full(len(table), np.nan)
    for column in table.T:
        latest = np.where(np.isnan(column), latest, column)
    return latest


def _known_mean(part: np.ndarray) -> np.ndarray:
    known = ~np.isnan(part)
    counts = known.sum(axis=0)
    return np.where(counts > 0, np.where(known, part, 0).sum(axis=0) / np.maximum(counts, 1), np.nan)


def client_heatmap(
    run: Run,
    found: Accuracies | None = None,
    scale: tuple[float, float] | None = None,
    title: str = "",
    where: str = "",
) -> Figure:
    """One run: the accuracy of every client that was tested, in every evaluated round; `found` are those read already.

    With a `scale`, from the darkest to the brightest accuracy, the maps of several runs can be compared.
    """
    found = found or client_accuracies(run)
    low, high = scale or (None, None)
    with plot_style():
        figure = new_figure(height=1.7 + 0.24 * min(len(found.rows), 22))
        axes = figure.add_subplot()
        axes.grid(False)
        axes.set(
            title=fill(title or run.config.label, 46),
            xlabel="Round",
            ylabel="Clients by rank, worst first" if found.grouped else "",
        )
        images = "validation images" if run.config.federation.evaluate_on == "validation" else ""
        add_place(axes, ", ".join(filter(None, [where, f"seed {run.config.seed}", images])))
        if found.rounds:
            image = axes.imshow(
                found.table, aspect="auto", cmap="cividis", interpolation="nearest", vmin=low, vmax=high
            )
            figure.colorbar(image, ax=axes, label="Accuracy (%)")
            thin(axes.set_xticks, [str(round) for round in found.rounds], NAMED_COLUMNS)
            thin(axes.set_yticks, [shortened(name) for name in found.rows], NAMED_ROWS)
    return figure


def accuracy_range(found: Sequence[Accuracies]) -> tuple[float, float] | None:
    """The scale of the heat maps of several runs, which makes their colours comparable."""
    known = [each.table[~np.isnan(each.table)] for each in found]
    values = np.concatenate(known) if known else np.array([])
    return (float(values.min()), float(values.max())) if len(values) else None


@dataclass(frozen=True)
class Partition:
    """Training images of some clients by class."""

    matrix: np.ndarray
    """(clients shown, classes)."""
    clients: list[str]
    classes: list[str]
    sizes: np.ndarray
    """Training images of every client, also of those not shown."""

    @property
    def caption(self) -> str:
        """In words, for screen readers."""
        least, middle, most = (int(number) for number in np.percentile(self.sizes, [0, 50, 100]))
        shown = f", {len(self.clients)} of them drawn" if len(self.clients) < len(self.sizes) else ""
        sizes = f"{most} images each" if least == most else f"{least} to {most} images each ({middle} in the middle)"
        cells = np.unique(self.matrix)
        alike = f" The map has one colour: every cell holds {cells[0]} images." if len(cells) == 1 else " Blank: none."
        return (
            f"Training images by client and class: {len(self.sizes)} clients{shown}, {len(self.classes)} classes, "
            f"{sizes}.{alike}"
        )


def partition_of(run: Run) -> Partition | None:
    """Training images by client and class; None if the run file does not have them."""
    text, classes = run.reader.fact(class_counts.FACT), run.reader.fact("classes")
    if text is None or classes is None:
        return None
    try:
        sizes = class_counts.sizes(text)
        if len(sizes) != len(run.clients):
            raise ValueError(f"must have {len(run.clients)} clients, got {len(sizes)}")
        chosen = np.unique(np.linspace(0, len(sizes) - 1, min(MOST_ROWS, len(sizes))).astype(int))
        matrix = class_counts.class_matrix(text, len(classes), chosen)
    except (TypeError, ValueError) as error:
        raise RunError(f"run: {str(run.directory)!r} is damaged: fact {class_counts.FACT!r} {error}") from error
    return Partition(matrix, [run.clients[int(client)] for client in chosen], classes, sizes)


def partition_picture(partition: Partition, where: str) -> Figure:
    """Clients by classes. Cells without images are blank, so that "none" and "few" look different."""
    matrix = partition.matrix
    most = max(1, int(matrix.max(initial=0)))
    with plot_style():
        figure = new_figure(height=2.0 + 0.24 * min(len(matrix), 22))
        axes = figure.add_subplot()
        axes.grid(False)
        axes.set(title="Partition", xlabel="Class")
        add_place(axes, where)
        shown = np.ma.masked_equal(matrix, 0)
        norm = PowerNorm(0.5, 0, most)  # the square root spreads the many small counts
        image = axes.imshow(shown, cmap="cividis", norm=norm, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axes, label="Training images", ticks=MaxNLocator(5, integer=True))
        thin(axes.set_xticks, [shortened(name) for name in partition.classes], NAMED_COLUMNS)
        thin(axes.set_yticks, [shortened(name) for name in partition.clients], NAMED_ROWS)
        if max(map(len, partition.classes), default=0) > 2:
            axes.tick_params(axis="x", rotation=90)
        for (row, column), count in np.ndenumerate(matrix) if matrix.size <= MOST_NUMBERS else ():
            if count:
                tint = "black" if norm(count) > 0.55 else "white"
                axes.text(column, row, str(int(count)), ha="center", va="center", fontsize=8, color=tint)
    return figure


def shortened(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
