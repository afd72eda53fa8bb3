"""Plots of runs: one function each, from runs to a matplotlib figure.

Every plot draws families (the same rows as the table) in the same order and colours: a family's number gives its
colour. The `draw_...` functions fill one pair of axes, so that the overview can put several side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, SymmetricalLogLocator

from fedprompt.errors import RunError
from fedprompt.io.files import write_atomically
from fedprompt.metrics.accuracy import mean_title
from fedprompt.report.comparison_table import averaged, format_bytes, row_of
from fedprompt.report.evaluated_rounds import accuracy_title, last_results
from fedprompt.report.method_grid import Arrangement
from fedprompt.report.plot_style import INK, colour, marker, new_figure, plot_style, png
from fedprompt.runs.families import Family, Labelled, families
from fedprompt.runs.run import Run

Groups = Mapping[int, Family]  # families by number
Draw = Callable[[Axes, Groups], None]
TASKS = 6  # that have a place in the overview
FEWEST_POINTS = 3  # of a learning curve


def learning_curves(runs: Sequence[Run]) -> Figure:
    """Average (solid) and Worst Local (dashed) by round, with a band of one standard deviation over seeds."""
    return picture(draw_curves, runs)


def client_spread(runs: Sequence[Run]) -> Figure:
    """The clients' accuracies from the worst to the best: the flatter a line, the fairer the method."""
    return picture(draw_clients, runs)


def domain_bars(runs: Sequence[Run]) -> Figure:
    """Accuracy on each domain's images, over all clients."""
    return picture(draw_domains, runs)


def bytes_against_accuracy(runs: Sequence[Run]) -> Figure:
    """Average against all bytes sent in both directions."""
    return picture(draw_bytes, runs)


def calibration(runs: Sequence[Run]) -> Figure:
    """Accuracy by confidence, over the images of all clients in the last evaluated round."""
    return picture(draw_calibration, runs)


def save_overview(arranged: Arrangement, path: Path) -> Path:
    """One PNG for a README: learning curves if there are any, accuracies of the clients and, if there are several, of the domains.

    Each of the first few tasks has its own row.
    """
    columns = arranged.columns[:TASKS]
    groups = {number: family for column in columns for number, family in column.families.items()}
    panels: list[Draw] = [draw_curves] if has_curves(groups) else []
    panels += [draw_clients, *([draw_domains] if len(domain_names(groups)) > 1 else [])]
    with plot_style():
        figure = new_figure(5.2 * len(panels), 4.8 * len(columns))
        places = [(column, draw) for column in columns for draw in panels]
        for number, (column, draw) in enumerate(places, start=1):
            axes = figure.add_subplot(len(columns), len(panels), number)
            draw(axes, column.families)
            if column.label:
                add_place(axes, column.label)
        add_legend(figure, dict(sorted(groups.items())))
    write_atomically(path, png(figure))
    return path


def picture(draw: Draw, runs: Sequence[Run]) -> Figure:
    return of_families(draw, dict(enumerate(families(runs))))


def of_families(draw: Draw, groups: Groups, where: str = "") -> Figure:
    """One picture with its legend; `where` distinguishes it from the same picture of other tasks."""
    with plot_style():
        figure = new_figure()
        axes = figure.add_subplot()
        draw(axes, groups)
        if where:
            add_place(axes, where)
        add_legend(figure, groups)
    return figure


def add_place(axes: Axes, where: str) -> None:
    """A line below the title."""
    axes.set_title("\n".join([axes.get_title(loc="left"), *wrap(where, 60)]))


def add_legend(figure: Figure, groups: Mapping[int, Labelled]) -> None:
    """Below the figure, in as many columns as fit: it never covers data, and many methods make it taller."""
    titles = {number: fill(group.title, 58) for number, group in groups.items()}
    handles = [
        Line2D([], [], color=colour(number), marker=marker(number), label=title) for number, title in titles.items()
    ]
    if handles:
        longest = max(len(line) for title in titles.values() for line in title.splitlines())
        columns = min(len(handles), max(1, int(figure.get_figwidth() / (0.6 + 0.09 * longest))))
        lines = -(-len(handles) // columns) + sum(title.count("\n") for title in titles.values())
        figure.set_figheight(figure.get_figheight() + 0.22 * lines)  # the axes keep their height
        figure.legend(handles=handles, loc="outside lower left", ncols=columns)


def has_curves(groups: Groups) -> bool:
    """Whether a run was evaluated often enough for a line that shows a course."""
    return any(len(run.history()) >= FEWEST_POINTS for run in members(groups))


def draw_curves(axes: Axes, groups: Groups) -> None:
    for number, group in groups.items():
        histories = [{entry["round"]: entry for entry in run.history()} for run in group.runs]
        rounds = sorted(
            set.intersection(*map(set, histories))
        )  # all of them: a family got equally far with one schedule
        for key, line in (("average", "-"), ("worst", "--")):
            table = 100 * np.array([[history[round][key] for round in rounds] for history in histories])
            mean = table.mean(axis=0)
            axes.plot(rounds, mean, line, markersize=4, **dress(number, len(rounds)))
            if len(table) > 1:
                draw_band(axes, number, rounds, mean, table.std(axis=0, ddof=1))
    axes.set(title="Average (solid) and Worst Local (dashed)", xlabel="Round")
    axes.set_ylabel(f"{accuracy_title(members(groups))} (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def members(groups: Groups) -> list[Run]:
    """All runs of some families."""
    return [run for group in groups.values() for run in group.runs]


def draw_band(axes: Axes, number: int, places: Sequence[float] | np.ndarray, mean: np.ndarray, std: np.ndarray) -> None:
    """One standard deviation to either side, within what an accuracy can be."""
    low, high = np.clip([mean - std, mean + std], 0, 100)
    axes.fill_between(places, low, high, color=colour(number), alpha=0.12, linewidth=0)


def draw_clients(axes: Axes, groups: Groups) -> None:
    most = 1
    for number, group in groups.items():
        last = [found for run in group.runs if (found := last_results(run)) is not None]
        accuracies = [np.sort(found.accuracies) for found in last if len(found.accuracies)]
        if not accuracies:
            continue
        count = max(map(len, accuracies))
        most = max(most, count)
        share = np.linspace(0, 1, count)  # seeds may give different numbers of clients; equal numbers stay unchanged
        ranked = [np.interp(share, np.linspace(0, 1, len(values)), values) for values in accuracies]
        mean = 100 * np.mean(ranked, axis=0)
        axes.plot(np.arange(1, count + 1), mean, markersize=5, linewidth=1, **dress(number, count))
    axes.set(title="Clients, worst to best", xlabel="Rank of the client")
    axes.set_ylabel(f"{accuracy_title(members(groups), last=True)} in the last round (%)")
    axes.set_xlim(0.5, most + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def draw_domains(axes: Axes, groups: Groups) -> None:
    names = domain_names(groups)
    width = 0.84 / max(1, len(groups))
    for place, (number, group) in enumerate(groups.items()):
        found = [run.summary().get("domains", {}) for run in group.runs]
        for position, name in enumerate(names):
            values = [100 * domains[name] for domains in found if name in domains]
            if values:
                middle = position - 0.42 + (place + 0.5) * width
                error = np.std(values, ddof=1) if len(values) > 1 else None
                axes.bar(middle, np.mean(values), 0.92 * width, yerr=error, color=colour(number), ecolor=INK)
    axes.set(title="Domains", ylabel=f"{accuracy_title(members(groups), last=True)} (%)", ylim=(0, None))
    axes.grid(False, axis="x")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")


def draw_bytes(axes: Axes, groups: Groups) -> None:
    totals, rows = [], {number: row_of(group) for number, group in groups.items()}
    for number, row in rows.items():
        values = row.values
        average, sent = values["average"], values["bytes_total"]
        if average is None or sent is None:
            continue
        totals.append(sent.mean)
        error = None if average.std is None else 100 * average.std
        axes.errorbar(
            sent.mean, 100 * average.mean, error, color=colour(number), marker=marker(number), markersize=8, capsize=3
        )
    accuracy = accuracy_title(members(groups), last=True)
    title = mean_title("Average", averaged([*rows.values()])) + accuracy.removeprefix("Accuracy")
    axes.set(title="Communication", xlabel="Bytes sent in the whole run, up and down", ylabel=f"{title}, %")
    scale_bytes(axes, totals)


def scale_bytes(axes: Axes, totals: Sequence[float]) -> None:
    """Methods differ by orders of magnitude, so the axis is logarithmic; one that sends nothing is still at zero."""
    positive = [total for total in totals if total > 0]
    if positive and min(totals) > 0:
        axes.set_xscale("log")
        decades = np.log10(max(positive) / min(positive))
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 1.5 else (1.0, 2.0, 5.0), numticks=6))
        room = 2 if decades > 0.5 else 4  # at least two ticks, also where all sent about the same
        axes.set_xlim(min(positive) / room, max(positive) * room)
    elif positive:
        threshold = 10 ** np.floor(np.log10(min(positive)))
        axes.set_xscale("symlog", linthresh=threshold)
        axes.xaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
        axes.set_xlim(-threshold / 2, max(positive) * 3)
    else:  # no client sends anything: a scale around 0 would have ticks of parts of a byte
        axes.set_xlim(-1, 1)
        axes.set_xticks([0])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value).replace(".0 ", " ")))
    axes.xaxis.set_minor_formatter(NullFormatter())


def draw_calibration(axes: Axes, groups: Groups) -> None:
    axes.plot([0, 100], [0, 100], color=INK, linewidth=1, linestyle=":")
    for number, group in groups.items():
        bins = pooled_bins(group.runs)
        if bins is None:
            continue
        samples, confidence, correct = bins[bins[:, 0] > 0].T
        axes.plot(100 * confidence / samples, 100 * correct / samples, color=colour(number), linewidth=1.2)
        axes.scatter(
            100 * confidence / samples,
            100 * correct / samples,
            s=12 + 140 * samples / samples.sum(),  # large where most of the images are
            color=colour(number),
            marker=marker(number),
        )
    title = accuracy_title(members(groups), last=True)
    axes.set(title="Calibration", xlabel="Confidence (%)", ylabel=f"{title} (%)", xlim=(0, 101), ylim=(0, 101))


def pooled_bins(runs: Sequence[Run]) -> np.ndarray | None:
    """Samples, summed confidence and correct answers per bin, over all clients and seeds, in the last evaluation."""
    found = [last.bins for run in runs if (last := last_results(run)) is not None and last.bins is not None]
    if len({len(bins) for bins in found}) > 1:
        names = ", ".join(run.name for run in runs)
        raise RunError(f"run: {names}: seeds of one setting must have the same number of calibration bins")
    return np.sum(found, axis=0) if found else None


def domain_names(groups: Groups) -> list[str]:
    """Every domain that was evaluated somewhere, by name."""
    return sorted(
        {name for group in groups.values() for run in group.runs for name in run.summary().get("domains", {})}
    )


def dress(number: int, points: int) -> dict[str, Any]:
    """Colour and markers of a family's line; a long line gets few markers, so that they do not hide it."""
    return {"color": colour(number), "marker": marker(number), "markevery": max(1, points // 12)}


def thin(set_ticks: Callable[..., object], names: Sequence[str], most: int) -> None:
    """Ticks for a limited number of names, evenly spread: readable with a thousand clients too."""
    step = max(1, -(-len(names) // most))
    set_ticks(range(0, len(names), step), names[::step])
