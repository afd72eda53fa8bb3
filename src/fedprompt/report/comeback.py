"""A client that was away for some rounds, compared with the same client in runs without the absence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedprompt.io.files import write_atomically
from fedprompt.runs.families import Family, Labelled, families
from fedprompt.runs.run import Run


def with_and_without(runs: Sequence[Run], client: str) -> list[tuple[Labelled, Family]]:
    """The families of some runs, each called by its method and by whether the client was away."""
    named = []
    for group in families(runs, "federation.away"):
        presence = "away" if client in group.runs[0].config.federation.away else "present"
        named.append((Labelled(f"{group.label} {presence}", group.rounds, group.of, ended=group.ended), group))
    return named


def accuracies(groups: Sequence[Family], client: str) -> dict[int, list[float | None]]:
    """By evaluated round: the client's accuracy in every family, mean over seeds; None if it was not tested."""
    columns = [_by_round(group, client) for group in groups]
    rounds = sorted({round for column in columns for round in column})
    return {round: [column.get(round) for column in columns] for round in rounds}


def _by_round(group: Family, client: str) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for run in group.runs:
        for entry in run.history():
            tested = run.client_accuracies(entry["round"])
            if client in tested:
                found.setdefault(entry["round"], []).append(tested[client])
    return {round: sum(values) / len(values) for round, values in found.items()}


def comeback_table(runs: Sequence[Run], client: str, away: tuple[int, int]) -> str:
    """Plain text: one line a round, one column a family; rounds of the absence are marked."""
    named = with_and_without(runs, client)
    titles = [label.title for label, _ in named]
    lines = [f"accuracy of {client} in per cent, away in rounds {away[0]} to {away[1]}", "  ".join(["round", *titles])]
    for round, values in accuracies([group for _, group in named], client).items():
        cells = [
            ("–" if value is None else f"{100 * value:.2f}").rjust(len(title))
            for title, value in zip(titles, values, strict=True)
        ]
        mark = "  away" if away[0] <= round <= away[1] else ""
        lines.append("  ".join([f"{round:5}", *cells]) + mark)
    return "\n".join(lines)


def save_comeback(runs: Sequence[Run], client: str, away: tuple[int, int], path: Path) -> Path:
    """Draw the client's accuracy by round, the absence shaded, as a PNG."""
    from matplotlib.ticker import MaxNLocator

    from fedprompt.report.evaluated_rounds import accuracy_title
    from fedprompt.report.plot_style import INK, new_figure, plot_style, png
    from fedprompt.report.plots import add_legend, dress

    named = with_and_without(runs, client)
    table = accuracies([group for _, group in named], client)
    with plot_style():
        figure = new_figure()
        axes = figure.add_subplot()
        axes.axvspan(away[0] - 0.5, away[1] + 0.5, color=INK, alpha=0.08, linewidth=0)
        for number in range(len(named)):
            points = [(round, values[number]) for round, values in table.items()]
            known = [(round, 100 * value) for round, value in points if value is not None]
            axes.plot([place for place, _ in known], [value for _, value in known], **dress(number, len(known)))
        axes.set(title=f"{client}, away in the shaded rounds", xlabel="Round", ylabel=f"{accuracy_title(runs)} (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        add_legend(figure, dict(enumerate(label for label, _ in named)))
    write_atomically(path, png(figure))
    return path
