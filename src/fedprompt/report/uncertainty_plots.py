"""Pictures of what an uncertainty is worth, and of what draws add to a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedprompt.report.plot_style import colour, marker, new_figure, plot_style

EVERY = 20  # points of a curve from one mark to the next


def risk_coverage(curves: Mapping[str, Sequence[np.ndarray]]) -> Figure:
    """Risk by coverage for every row: the mean over its runs, from 1 % of the images to all of them."""
    with plot_style():
        figure = new_figure(height=4.2)
        axes = figure.add_subplot()
        for number, (label, runs) in enumerate(curves.items()):
            risk = 100 * np.mean(runs, axis=0)
            coverage = np.arange(1, len(risk) + 1) * 100 / len(risk)
            marks = (number * 3 % EVERY, EVERY)
            axes.plot(coverage, risk, color=colour(number), marker=marker(number), markevery=marks, label=label)
        axes.set(title="Wrong answers among the most certain", xlabel="Coverage (% of the images)", ylabel="Risk (%)")
        axes.set_ylim(bottom=0)
        _legend(figure, axes)
    return figure


def by_draws(accuracies: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Accuracy by the number of draws that are averaged; the bars are one standard deviation over runs."""
    with plot_style():
        figure = new_figure(height=3.8)
        axes = figure.add_subplot()
        for number, (label, runs) in enumerate(accuracies.items()):
            table = 100 * np.array(runs)
            draws = np.arange(1, table.shape[1] + 1)
            spread = table.std(0, ddof=1) if len(table) > 1 else None
            axes.errorbar(
                draws, table.mean(0), spread, color=colour(number), marker=marker(number), label=label, capsize=2
            )
        axes.set(title="Accuracy by draws in a prediction", xlabel="Draws V", ylabel="Accuracy (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + 0.22 * len(labels))
    figure.legend(handles, labels, loc="outside lower left")
