"""The style of every plot, and how a figure becomes SVG or PNG.

Figures are made without pyplot: no global state, no display, nothing to close. `look` must be active both while a
figure is drawn and while it is saved.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GRID = "#24292f", "#d5dae0"  # in SVG these two become CSS variables, so that a dark page can turn them round

# Okabe and Ito's colours, distinct for every colour vision; yellow is left out, too pale on white
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = (
    "",
    "///",
    "...",
    "xxx",
    "\\\\\\",
    "+++",
    "ooo",
)  # of areas, so that they can be distinguished without colour

SETTINGS: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a client may be called "$x"
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedprompt",  # equal figures give equal bytes
    "grid.color": GRID,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK
    ),
}


@contextmanager
def plot_style() -> Iterator[None]:
    """The settings above on top of matplotlib's own defaults, ignoring the user's matplotlibrc."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def marker(number: int) -> str:
    """Changes with every colour, and shifts when the colours repeat."""
    return MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]


def hatch(number: int) -> str:
    return HATCHES[(number + number // len(PALETTE)) % len(HATCHES)]


class Picture(Figure):
    """A figure that a notebook shows, without pyplot."""

    def _repr_png_(self) -> bytes:
        return png(self)


def new_figure(width: float = 5.2, height: float = 3.6) -> Picture:
    """Narrow enough that its letters can be read on a phone, where a page shrinks it to some 330 pixels."""
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: int = 150) -> bytes:
    buffer = io.BytesIO()
    with plot_style():
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def svg_file(figure: Figure) -> bytes:
    """For papers: colours unchanged, and letters as outlines, so that it looks the same everywhere."""
    buffer = io.BytesIO()
    with plot_style(), matplotlib.rc_context({"svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    return buffer.getvalue()


def svg(figure: Figure, prefix: str) -> str:
    """An `<svg>` element for a page: transparent, with unique ids and the page's text colours."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with plot_style():
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
