"""A picture of a partition: how many training images of each class a client has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedprompt.errors import StorageError

MOST_LABELS = 60  # with more rows or columns, only some of them are labelled
MOST_NUMBERS = 250  # largest number of cells with printed counts


def draw_matrix(matrix: np.ndarray, clients: Sequence[str], classes: Sequence[str], path: Path) -> None:
    """A heat map (clients, classes) as PNG. Empty cells are white, so that "none" and "few" look different."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # no pyplot: it keeps global state and may open a window
    from matplotlib.colors import PowerNorm  # the square root spreads the many small counts
    from matplotlib.figure import Figure

    rows, columns = matrix.shape
    cell = min(0.5, 14 / max(rows, columns))  # inches
    longest = max(map(len, classes))
    figure = Figure(
        figsize=(max(4.5, columns * cell + 2.6), max(2.6, rows * cell + 1.2 + min(longest, 20) * 0.07)), dpi=130
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = np.ma.masked_equal(matrix, 0)
    image = axes.imshow(
        shown,
        cmap="cividis_r",
        norm=PowerNorm(0.5, 0, max(1, int(matrix.max()))),
        aspect="auto",
        interpolation="nearest",
    )
    for axis, names in ((axes.yaxis, clients), (axes.xaxis, classes)):
        step = -(-len(names) // MOST_LABELS)
        size = float(np.clip(72 * cell * step * 0.75, 4, 8))
        axis.set_ticks(range(0, len(names), step), [_short(name) for name in names[::step]], fontsize=size)
    axes.tick_params(axis="x", rotation=90 if longest > 3 else 0)
    if matrix.size <= MOST_NUMBERS:
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                colour = "black" if count < 0.3 * matrix.max() else "white"
                axes.text(column, row, str(int(count)), ha="center", va="center", fontsize=7, color=colour)
    axes.set_xlabel(f"class ({columns})")
    axes.set_ylabel(f"client ({rows})")
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="training images (white: none)")
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise StorageError(f"picture: cannot write {str(path)!r}: {error.strerror}") from error


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"
