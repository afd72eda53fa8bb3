"""The parts of a report: text, plots and tables, before they become HTML or files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from fedprompt.report import class_tables, cost_plots, events, heatmaps, plots, rank_diagram
from fedprompt.report.comparison_table import NOTHING, Cell, percent, spread
from fedprompt.report.html_elements import slug
from fedprompt.report.method_grid import Arrangement, Column
from fedprompt.runs.families import Family
from fedprompt.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = "Ranks over tasks"
METRICS = "Classification metrics"
MOST_OPEN = 6  # pictures of one kind that are not folded
MOST_LISTED = 8  # names or numbers in a cell


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows in words, and the name of its files."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Table:
    """Numbers next to a picture, or instead of one."""

    name: str
    head: list[str]
    rows: list[list[Cell]]
    kind: str = ""


@dataclass(frozen=True)
class Part:
    """A section of the report."""

    title: str
    texts: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    more: list[Picture] = field(default_factory=list)
    """Folded on the page."""
    tables: list[Table] = field(default_factory=list)
    details: list[Table] = field(default_factory=list)
    """Folded on the page, each under its name."""
    unfolded: bool = False
    """Its tables are what it is about, not the numbers of a picture."""


def all_parts(runs: Sequence[Run], arranged: Arrangement, found: class_tables.Found | None = None) -> list[Part]:
    """In the order of the page, without empty ones; settings and runs, which have no pictures, follow them there.

    `found` are figures by class that were computed; those of the run files when absent.
    """
    parts = [
        ranks_over_tasks(arranged),
        learning_curves(arranged),
        fairness(arranged),
        clients_by_round(arranged),
        domains(arranged),
        classification_metrics(found or class_tables.stored(runs), arranged),
        calibration(arranged),
        communication(arranged),
        time_by_phase(arranged),
        partitions(arranged),
        privacy_budget(arranged),
        refused_updates(runs),
    ]
    return [part for part in parts if part.texts or part.pictures or part.tables]


def ranks_over_tasks(arranged: Arrangement) -> Part:
    """Only with at least three tasks on which the same methods were tested."""
    found = rank_diagram.ranked_methods(arranged)
    if found is None:
        return Part(RANKS)
    picture = Picture("ranks-over-tasks", found.caption, rank_diagram.rank_picture(found))
    return Part(RANKS, [found.sentence], [picture])


def learning_curves(arranged: Arrangement) -> Part:
    """Only of tasks with a run that was evaluated often enough: a line between two points shows no course."""
    chosen = [column for column in arranged.columns if plots.has_curves(column.families)]
    caption = "Accuracy by round: mean over seeds, band of one standard deviation. Solid: Average. Dashed: Worst Local."
    return _part("Learning curves", _pictures("learning-curves", chosen, _drawn(plots.draw_curves), caption))


def fairness(arranged: Arrangement) -> Part:
    caption = (
        "Accuracies of the clients in the last evaluated round, sorted: the flatter the line, the fairer the method."
    )
    return _by_column("Fairness", arranged, plots.draw_clients, caption)


def communication(arranged: Arrangement) -> Part:
    caption = "Average against the bytes sent by all clients and the server: the best are at the upper left."
    return _by_column("Communication", arranged, plots.draw_bytes, caption)


def calibration(arranged: Arrangement) -> Part:
    caption = (
        "Accuracy against confidence in the last evaluated round. Dotted: perfectly calibrated; below it, too sure. "
        "Large marks hold many images."
    )
    return _by_column("Calibration", arranged, plots.draw_calibration, caption)


def domains(arranged: Arrangement) -> Part:
    """Only if there are several."""
    chosen = [column for column in arranged.columns if len(plots.domain_names(column.families)) > 1]
    if not chosen:
        return Part("Domains")
    caption = (
        "Accuracy on the images of each domain, over the last evaluated rounds. Bars have the order of the legend."
    )
    shown = _pictures("domains", chosen, _drawn(plots.draw_domains), caption)
    return _part("Domains", shown, tables=[_domain_table(column) for column in chosen])


def _domain_table(column: Column) -> Table:
    names = plots.domain_names(column.families)
    rows = []
    for family in column.families.values():
        found = [run.summary().get("domains", {}) for run in family.runs]
        values = [spread(each.get(name) for each in found) for name in names]
        rows.append([Cell(family.title), *(Cell(NOTHING if value is None else percent(value)) for value in values)])
    return Table(_named("Accuracy by domain, per cent", column), ["Method", *names], rows)


def classification_metrics(found: class_tables.Found, arranged: Arrangement) -> Part:
    """Those of the last test, and one confusion matrix for each method."""
    every = class_tables.rows_by_run(found)
    if not every:
        return Part(METRICS)
    shown, seen = [], set[str]()
    for run, figures in found.by_run.items():
        if figures and run.config.label not in seen:
            seen.add(run.config.label)
            caption = f"{run.name}: test images of each class by prediction, all clients together."
            picture = class_tables.confusion_picture(run, figures[0])
            shown.append(Picture(f"confusion-{slug(run.name)}", caption, picture))
    head = class_tables.head_by_method(found)
    tables = [
        Table(_named("By method", column), head, rows)
        for column in arranged.columns
        if (rows := class_tables.rows_by_method(found, column))
    ]
    details = [Table("By run, domain and client", class_tables.head_by_run(found), every)]
    return Part(METRICS, [found.meaning], shown[:2], shown[2:], tables, details, unfolded=True)


def time_by_phase(arranged: Arrangement) -> Part:
    caption = "Seconds of a whole run by phase, mean over seeds; the machine was not necessarily idle."
    shown = _pictures(
        "time-by-phase", arranged.columns, lambda each: cost_plots.phase_bars(each.families, each.label), caption
    )
    return _part("Time by phase", shown, tables=[_phase_table(column) for column in arranged.columns])


def _phase_table(column: Column) -> Table:
    found = [(family.title, events.phase_seconds(family)) for family in column.families.values()]
    phases = list(dict.fromkeys(phase for _, seconds in found for phase in seconds))
    rows = [
        [
            Cell(title),
            *(Cell(f"{seconds.get(phase, 0.0):.2f}") for phase in phases),
            Cell(f"{sum(seconds.values()):.2f}"),
        ]
        for title, seconds in found
    ]
    return Table(_named("Seconds by phase", column), ["Method", *phases, "Total"], rows)


def clients_by_round(arranged: Arrangement) -> Part:
    """The first seed of every method, on one colour scale within a task; the other seeds follow."""
    first: list[Picture] = []
    others: list[Picture] = []
    for column in arranged.columns:
        members = [(family, run) for family in column.families.values() for run in family.runs if run.history()]
        found = [heatmaps.client_accuracies(run) for _, run in members]
        scale = heatmaps.accuracy_range(found)
        where = f", {column.label}" if column.label else ""
        for (family, run), accuracies in zip(members, found, strict=True):
            caption = (
                f"{family.title}, seed {run.config.seed}{where}: accuracy of every client in every evaluated round."
            )
            if accuracies.one_value is not None:
                caption += f" The map has one colour: every cell is {accuracies.one_value:.2f} %."
            figure = heatmaps.client_heatmap(run, accuracies, scale, family.title, column.label)
            shown = first if run is family.runs[0] else others
            shown.append(Picture(f"clients-by-round-{slug(run.name)}", caption, figure))
    text = (
        "Bright is accurate. All maps of one task have the same scale. With many clients, a row is the mean of several."
    )
    return _part("Clients by round", first, others, [text])


def partitions(arranged: Arrangement) -> Part:
    """Every partition once, for all methods: one of every task shown, those of other seeds folded."""
    seen: set[str] = set()
    silent: list[str] = []
    first: list[Picture] = []
    others: list[Picture] = []
    for column in arranged.columns:
        opened = False
        for run in (run for family in column.families.values() for run in family.runs):
            manifest = run.reader.fact("manifest")
            key = str(manifest.get("checksum")) if isinstance(manifest, dict) else run.name
            if key in seen:
                continue
            partition = heatmaps.partition_of(run)
            if partition is None:
                silent.append(run.name)
                continue
            seen.add(key)
            (others if opened else first).append(_partition_picture(run, partition, column))
            opened = True
    note = "Classes by client are not in these run files, which are of sites or of an earlier version: "
    return _part("Partition", first, others, [f"{note}{listed(silent)}."] if silent else [])


def _partition_picture(run: Run, partition: heatmaps.Partition, column: Column) -> Picture:
    scheme = f"{PurePath(run.config.data.source).name}, {run.config.partition.scheme}"
    title = f"{column.label or scheme}, seed {run.config.seed}"
    figure = heatmaps.partition_picture(partition, title)
    return Picture(f"partition-{slug(run.name)}", f"{title}: {partition.caption}", figure)


def refused_updates(runs: Sequence[Run]) -> Part:
    shown, rows, absent = [], [], []
    for run in runs:
        found, away = events.refusals(run), events.absences(run)
        if away:
            clients = sorted({each.client for each in away if each.client is not None})
            names = listed([events.client_name(run, client) for client in clients])
            rounds = listed([str(round) for round in sorted({each.round for each in away})])
            absent.append(f"{run.name}: absent, no update came: {names}, in rounds {rounds}.")
        if found:
            caption = f"{run.name}: {len(found)} updates that the guard kept out, by round, client and rule."
            shown.append(Picture(f"refused-{slug(run.name)}", caption, cost_plots.refusal_picture(run)))
        for rule, count in sorted(Counter(refusal.rule for refusal in found).items()):
            these = [refusal for refusal in found if refusal.rule == rule]
            clients = sorted({refusal.client for refusal in these if refusal.client is not None})
            cells = [
                run.name,
                rule,
                str(count),
                listed([str(number) for number in sorted({refusal.round for refusal in these})]),
                listed([events.client_name(run, client) for client in clients]),
                these[0].value,
            ]
            rows.append([Cell(cell) for cell in cells])
    if not rows:
        return Part("Absent clients", absent)
    head = ["Run", "Rule", "Updates", "Rounds", "Clients", "Found at first"]
    title = "Rejected updates and absent clients" if absent else "Rejected updates"
    return _part(title, shown, texts=absent, tables=[Table("Rejected updates", head, rows, "text")])


def privacy_budget(arranged: Arrangement) -> Part:
    private = [
        Column(column.label, found)
        for column in arranged.columns
        if (
            found := {n: family for n, family in column.families.items() if any(map(events.privacy_spent, family.runs))}
        )
    ]
    if not private:
        return Part("Privacy budget")
    caption = "Epsilon after every round, of the seed that spent most. Dashed: the budget at which a run ends."
    shown = _pictures("privacy", private, _drawn(cost_plots.draw_privacy), caption)
    head = ["Method", "Noise at", "Noise multiplier", "Clip", "Delta", "Epsilon", "Budget"]
    rows = [_privacy_row(family, column) for column in private for family in column.families.values()]
    return _part("Privacy budget", shown, tables=[Table("Privacy", head, rows)])


def _privacy_row(family: Family, column: Column) -> list[Cell]:
    spent = max(filter(None, map(events.privacy_spent, family.runs)), key=lambda each: each.total)
    settings = family.runs[0].config.privacy
    numbers = [spent.noise, spent.clip, spent.delta, spent.total, settings.max_epsilon if settings else None]
    where = f", {column.label}" if column.label else ""
    cells = [f"{family.title}{where}", settings.noise_at if settings else NOTHING]
    return [Cell(text) for text in [*cells, *(NOTHING if number is None else f"{number:.4g}" for number in numbers)]]


def listed(names: Sequence[str]) -> str:
    """Names or numbers, the first of very many."""
    rest = len(names) - MOST_LISTED
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:MOST_LISTED])} and {rest} more"


def _by_column(title: str, arranged: Arrangement, draw: plots.Draw, caption: str) -> Part:
    return _part(title, _pictures(slug(title), arranged.columns, _drawn(draw), caption))


def _drawn(draw: plots.Draw) -> Callable[[Column], Figure]:
    return lambda column: plots.of_families(draw, column.families, column.label)


def _pictures(name: str, columns: Sequence[Column], draw: Callable[[Column], Figure], caption: str) -> list[Picture]:
    return [
        Picture(f"{name}-{slug(column.label)}" if column.label else name, _named(caption, column), draw(column))
        for column in columns
    ]


def _named(text: str, column: Column) -> str:
    return f"{column.label}: {text}" if column.label else text


def _part(
    title: str,
    shown: list[Picture],
    more: Sequence[Picture] = (),
    texts: Sequence[str] = (),
    tables: Sequence[Table] = (),
) -> Part:
    return Part(title, list(texts), shown[:MOST_OPEN], [*shown[MOST_OPEN:], *more], list(tables))
