"""Plots of time by phase, refused updates and the privacy budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedprompt.report.events import Refusal, client_name, phase_seconds, privacy_spent, refusals
from fedprompt.report.heatmaps import shortened
from fedprompt.report.plot_style import INK, colour, hatch, marker, new_figure, plot_style
from fedprompt.report.plots import Groups, add_place, dress
from fedprompt.runs.run import Run

MOST_CLIENTS = 30  # refused clients that have a separate line
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def phase_bars(groups: Groups, where: str = "") -> Figure:
    """One bar a method, cut into the phases of its rounds."""
    found = {number: phase_seconds(group) for number, group in groups.items()}
    phases = list(dict.fromkeys(phase for seconds in found.values() for phase in seconds))
    longest = max((sum(seconds.values()) for seconds in found.values()), default=0.0)
    unit, size = next(((unit, size) for unit, size in UNITS if longest >= 3 * size), UNITS[-1])
    titles = [fill(shortened_title(group.title), 24) for group in groups.values()]
    lines = max((title.count("\n") + 1 for title in titles), default=1)
    with plot_style():
        figure = new_figure(height=1.5 + max(0.42, 0.2 * lines) * len(found))
        axes = figure.add_subplot()
        for place, seconds in enumerate(found.values()):
            start = 0.0
            for number, phase in enumerate(phases):
                width = seconds.get(phase, 0.0) / size
                axes.barh(place, width, 0.7, start, color=colour(number), hatch=hatch(number), edgecolor="white")
                start += width
            axes.annotate(f" {start:.3g}", (start, place), va="center")
        axes.set(title="Time by phase", xlabel=f"{unit.capitalize()} of a whole run")
        axes.set_yticks(range(len(titles)), titles)
        axes.set_ylim(len(found) - 0.4, -0.6)  # the first on top, as in the table
        axes.margins(x=0.12)
        axes.grid(False, axis="y")
        if where:
            add_place(axes, where)
        add_areas(figure, phases)
    return figure


def shortened_title(title: str) -> str:
    return title if len(title) <= 72 else f"{title[:71]}…"


def add_areas(figure: Figure, names: Sequence[str]) -> None:
    """A legend of areas below the figure."""
    handles = [
        Patch(facecolor=colour(number), hatch=hatch(number), edgecolor="white", label=name)
        for number, name in enumerate(names)
    ]
    if handles:
        columns = max(1, min(len(handles), 4))
        figure.set_figheight(figure.get_figheight() + 0.24 * -(-len(handles) // columns))
        figure.legend(handles=handles, loc="outside lower left", ncols=columns)


def refusal_picture(run: Run) -> Figure:
    """A mark for every refused update, by round, client and rule; with very many clients, their number by round."""
    found = refusals(run)
    clients = sorted({refusal.client for refusal in found if refusal.client is not None})
    rules = sorted({refusal.rule for refusal in found})
    few = len(clients) <= MOST_CLIENTS
    with plot_style():
        figure = new_figure(height=1.6 + 0.24 * len(clients) if few else 3.6)
        axes = figure.add_subplot()
        axes.set(title="Refused updates", xlabel="Round")
        add_place(axes, run.name)
        if few:
            _mark_clients(axes, run, found, clients, rules)
            handles: list[Any] = [
                Line2D([], [], linestyle="", color=colour(number), marker=marker(number), label=rule)
                for number, rule in enumerate(rules)
            ]
            figure.set_figheight(figure.get_figheight() + 0.24)
            figure.legend(handles=handles, loc="outside lower left", ncols=4)
        else:
            _count_by_round(axes, found, rules)
            add_areas(figure, rules)
        rounds = [record.round for record in run.rounds()] or [1]
        axes.set_xlim(0.5, max(1, *rounds, *(refusal.round for refusal in found)) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _mark_clients(axes: Axes, run: Run, found: Sequence[Refusal], clients: list[int], rules: list[str]) -> None:
    for number, rule in enumerate(rules):
        places = [
            (each.round, clients.index(each.client)) for each in found if each.rule == rule and each.client is not None
        ]
        axes.scatter([x for x, _ in places], [y for _, y in places], s=42, color=colour(number), marker=marker(number))
    axes.set_yticks(range(len(clients)), [shortened(client_name(run, client)) for client in clients])
    axes.set_ylim(len(clients) - 0.5, -0.5)


def _count_by_round(axes: Axes, found: Sequence[Refusal], rules: list[str]) -> None:
    rounds = sorted({refusal.round for refusal in found})
    below = np.zeros(len(rounds))
    for number, rule in enumerate(rules):
        counts = Counter(refusal.round for refusal in found if refusal.rule == rule)
        heights = np.array([counts[round] for round in rounds])
        axes.bar(rounds, heights, 0.8, below, color=colour(number), hatch=hatch(number), edgecolor="white")
        below = below + heights
    axes.set_ylabel("Updates")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def draw_privacy(axes: Axes, groups: Groups) -> None:
    """Epsilon by round, of the seed that spent most; a budget is a dashed line in the method's colour."""
    for number, group in groups.items():
        spent = max(filter(None, map(privacy_spent, group.runs)), key=lambda each: each.total, default=None)
        if spent is None:
            continue
        known = {round: epsilon for round, epsilon in spent.epsilons.items() if math.isfinite(epsilon)}
        axes.plot(list(known), list(known.values()), **dress(number, len(known)))
        settings = group.runs[0].config.privacy
        if settings is not None and settings.max_epsilon is not None:
            axes.axhline(settings.max_epsilon, color=colour(number), linestyle="--", linewidth=1)
    axes.axhline(0, color=INK, linewidth=0)  # epsilon begins at 0
    axes.set(title="Privacy spent", xlabel="Round", ylabel="Epsilon")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
