"""The picture of a sweep: accuracies against the values of one setting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedprompt.io.files import write_atomically
from fedprompt.metrics.accuracy import mean_title
from fedprompt.report.comparison_table import averaged, row_of
from fedprompt.report.plot_style import new_figure, plot_style, png
from fedprompt.report.plots import add_legend, draw_band, dress
from fedprompt.runs.families import Family, families, written
from fedprompt.runs.run import Run

PANELS = {"average": "Average", "worst": "Worst Local"}
TICKS = 12  # more would not be readable
SMALLEST_SPAN = 6.0  # of the accuracies shown, in per cent


def save_sweep(runs: Sequence[Run], field: str, path: Path) -> Path:
    """The picture as a PNG."""
    write_atomically(path, png(sweep_curves(runs, field)))
    return path


def sweep_curves(runs: Sequence[Run], field: str) -> Figure:
    """Average and Worst Local against a setting: a line per method, with a band of one standard deviation over seeds."""
    lines: dict[str, list[Family]] = defaultdict(list)
    for group in families(runs, field):
        lines[group.title].append(group)
    over = averaged([row_of(group) for groups in lines.values() for group in groups])
    axis = Axis([setting(run, field) for run in runs])
    with plot_style():
        figure = new_figure(10.4, 4.2)
        for position, (key, title) in enumerate(PANELS.items(), start=1):
            axes = figure.add_subplot(1, len(PANELS), position)
            for number, groups in enumerate(lines.values()):
                draw_line(axes, number, key, {axis.place(setting(group.runs[0], field)): group for group in groups})
            axes.set(title=mean_title(title, over), xlabel=field, ylabel="Accuracy (%)")
            axis.dress(axes)
            show_no_noise(axes)
        add_legend(figure, dict(enumerate(groups[0] for groups in lines.values())))
    return figure


def draw_line(axes: Axes, number: int, key: str, groups: dict[float, Family]) -> None:
    """One method: its mean at every place that was evaluated, and the band where there are several seeds."""
    spreads = {place: row_of(groups[place]).values[key] for place in sorted(groups)}
    points = [
        (place, value.mean, np.nan if value.std is None else value.std) for place, value in spreads.items() if value
    ]
    places, mean, std = np.array(points).reshape(-1, 3).T
    axes.plot(places, 100 * mean, markersize=5, **dress(number, 1))
    draw_band(axes, number, places, 100 * mean, 100 * std)


def show_no_noise(axes: Axes) -> None:
    """A minimum range of accuracy, so that a single image more or less does not look like an effect."""
    low, high = axes.get_ylim()
    if high - low < SMALLEST_SPAN:
        middle = min(max((low + high) / 2, SMALLEST_SPAN / 2), 100 - SMALLEST_SPAN / 2)
        axes.set_ylim(middle - SMALLEST_SPAN / 2, middle + SMALLEST_SPAN / 2)


class Axis:
    """Positions of values. Numbers are on a linear scale, or a logarithmic one if they span decades. Other values are
    evenly spaced in the given order, and so are numbers without a logarithm.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        self.values = {written(value): value for value in (sorted(values) if self.numeric else values)}

    @cached_property
    def scale(self) -> str:
        if not self.numeric:
            return "even"
        numbers = list(self.values.values())
        positive = [number for number in numbers if number > 0]
        if not positive or max(positive) < 100 * min(positive):
            return "linear"
        return "log" if positive == numbers else "even"

    def place(self, value: Any) -> float:
        return list(self.values).index(written(value)) if self.scale == "even" else value

    def dress(self, axes: Axes) -> None:
        """The scale, and a tick at the values themselves."""
        if self.scale == "log":
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
        shown = list(self.values)[:: -(-len(self.values) // TICKS)]
        axes.set_xticks([self.place(self.values[text]) for text in shown], shown)


def setting(run: Run, field: str) -> Any:
    """The value of `section.field` in the config of a run, also of a default that is not written down."""
    value: Any = run.config
    for step in field.split("."):
        value = value[step] if isinstance(value, Mapping) else getattr(value, step)
    return value
