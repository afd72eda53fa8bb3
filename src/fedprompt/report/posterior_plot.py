"""A picture of a posterior of instance prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedprompt.report.plot_style import colour, hatch, marker, new_figure, plot_style

MOST_NAMED = 10  # groups with an entry in a legend


def posterior_picture(
    title: str,
    points: np.ndarray,
    shares: Sequence[float],
    groups: Mapping[str, tuple[np.ndarray, Sequence[str]]],
    blocks: Sequence[int],
    spreads: Mapping[str, np.ndarray],
    attention: np.ndarray,
) -> Figure:
    """Principal components (n, 2) once for each of the two groupings, spreads by block, attention (n, L) by block."""
    with plot_style():
        figure = new_figure(width=10, height=8.6)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        panels = figure.subplots(2, 2)
        for axes, (name, (numbers, names)) in zip(panels[0], groups.items(), strict=True):
            _scatter(axes, points, numbers, names)
            axes.set(title=f"Instance prompts by {name}")
            axes.set(xlabel=f"First component ({100 * shares[0]:.0f} %)", ylabel=f"Second ({100 * shares[1]:.0f} %)")
        _bars(panels[1, 0], blocks, spreads)
        panels[1, 0].set(title="Spread, as a share of a token's length", xlabel="Block")
        panels[1, 1].boxplot(list(100 * attention.T), tick_labels=[str(block) for block in blocks], showfliers=False)
        panels[1, 1].set(title="Attention of CLS to instance prompts", xlabel="Block", ylabel="%")
        panels[1, 1].set_ylim(bottom=0)
    return figure


def _scatter(axes: Axes, points: np.ndarray, numbers: np.ndarray, names: Sequence[str]) -> None:
    there = [number for number in range(len(names)) if (numbers == number).any()]
    for place, number in enumerate(there):
        chosen = points[numbers == number]
        label = names[number] if place < MOST_NAMED else None
        axes.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=14,
            color=colour(place),
            marker=marker(place),
            alpha=0.75,
            linewidths=0,
            label=label,
        )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, handletextpad=0.2)


def _bars(axes: Axes, blocks: Sequence[int], spreads: Mapping[str, np.ndarray]) -> None:
    width, places = 0.8 / len(spreads), np.arange(len(blocks))
    for number, (name, values) in enumerate(spreads.items()):
        where = places - 0.4 + (number + 0.5) * width
        label = name if name == "sigma" else f"over {name}"
        axes.bar(where, values, width, color=colour(number), hatch=hatch(number), edgecolor="white", label=label)
    axes.set_xticks(places, [str(block) for block in blocks])
    axes.legend(loc="upper left", fontsize=9)
    axes.margins(y=0.25)
