"""The comparison table: one row per family, mean and sample standard deviation over its seeds.

`comparison` makes the rows; `table_formats` writes them. Accuracies are fractions in rows, CSV and JSON, and per cent in
tables for people.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fedprompt.config import TunedConfig
from fedprompt.io.safe_text import safe_line
from fedprompt.metrics.accuracy import final_title, mean_title
from fedprompt.runs.attendance import Coverage
from fedprompt.runs.families import BUDGET, TASK, Family, Labelled, Settings, disagreements, families, section
from fedprompt.runs.novel_figures import stored_figures
from fedprompt.runs.run import Run

NOTHING = "–"  # what was not measured; never a zero
LEVEL = "≈"  # behind a figure that is within the spread of the one in bold
LOCAL_HEAD = ("fedper", "fedrep")  # variants that keep the head of their method at the client
AT_MOST = "≤ "  # before a lowest accuracy where some clients could not be tested
WORST = ("worst", "final_worst", "picked_worst", "bottom_decile")


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    mean: float
    std: float | None
    """Sample standard deviation; one seed has none."""


@dataclass(frozen=True)
class Row(Labelled):
    """One family in the table."""

    family: str
    seeds: tuple[int, ...]
    values: dict[str, Spread | None]
    """By column key; None where nothing was evaluated yet."""
    settings: Settings
    """Rows with equal values can be compared."""
    repeated: tuple[str, ...] = ()
    """Runs left out because their seed is already counted."""
    attacked: bool = False
    """Some of its clients are malicious."""
    refused: dict[str, int] = field(default_factory=dict)
    """Refused updates of all its runs together, by rule."""
    absent: int = 0
    """How often a client that was picked sent nothing, in all its runs together."""
    coverage: Coverage | None = None
    """The evaluation with the fewest clients that its figures are of, where some could not be tested."""
    epsilon: float | None = None
    """The largest epsilon that one of its runs has spent; None without privacy."""
    warnings: tuple[str, ...] = ()
    """Signs that training did not work, of all its runs together."""
    evaluations: int = 1
    """Number of last evaluated rounds that its figures are means of."""
    tuned: TunedConfig | None = None
    """How its settings were found, if by `fedprompt tune`."""
    head: str = ""
    """Where its head is kept; rows with different heads are not ranked against each other. Empty without a head."""
    images: str = "test"
    """Which images its accuracies are of: those of the test, test images read once, or validation images."""


def percent(spread: Spread) -> str:
    mean = f"{100 * spread.mean:.2f}"
    return mean if spread.std is None else f"{mean} ± {100 * spread.std:.2f}"


def size(spread: Spread) -> str:
    return format_bytes(spread.mean)


def duration(spread: Spread) -> str:
    return f"{spread.mean:.1f}"


def format_bytes(count: float) -> str:
    """Decimal units, as networks count: 15360 is `15.4 kB`."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:  # prints as less than 1000.0
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


@dataclass(frozen=True)
class Column:
    """A figure of the table: its source and format."""

    key: str
    title: str
    write: Callable[[Spread], str]
    best: bool = False
    """The largest one is set in bold."""
    narrow: bool = False
    """Also shown in narrow tables."""


FINAL = ("final_average", "final_worst")  # shown where other accuracies are means of several rounds

COLUMNS = (
    Column("average", "Average", percent, best=True, narrow=True),
    Column("worst", "Worst Local", percent, best=True, narrow=True),
    Column("final_average", final_title("Average"), percent, best=True, narrow=True),
    Column("final_worst", final_title("Worst Local"), percent, best=True),
    Column("best_average", "Best", percent),
    Column("pooled", "Pooled", percent),
    Column("std", "Client std", percent),
    Column("bottom_decile", "Bottom 10%", percent),
    Column("ece", "ECE", percent, narrow=True),
    Column("bytes_up_each", "Up", size, narrow=True),
    Column("bytes_down_each", "Down", size, narrow=True),
    Column("bytes_total", "Total", size),
    Column("seconds", "Seconds", duration),
)

# shown where some clients never trained
PICKED_COLUMNS = (
    Column("picked_average", "Picked", percent, best=True, narrow=True),
    Column("picked_worst", "Picked worst", percent, best=True, narrow=True),
)

# shown where a run tested classes that its federation never saw
NOVEL_COLUMNS = (
    Column("local", "Local", percent, best=True, narrow=True),
    Column("base", "Base", percent, best=True, narrow=True),
    Column("novel", "Novel", percent, best=True, narrow=True),
    Column("hm", "HM", percent, best=True, narrow=True),
    Column("hm3", "HM3", percent),
)

SOMETIMES = (*PICKED_COLUMNS, *NOVEL_COLUMNS)

EXPLANATION = (
    "Accuracies, Client std and ECE in per cent, mean ± sample standard deviation over seeds. {over} Best is the highest "
    "Average of any round. Up and Down are bytes per participating client and round; Total is both directions of the "
    "whole run, and Seconds are its time."
)

PICKED_EXPLANATION = (
    "Picked and Picked worst: Average and Worst Local of the clients that have trained at least once. All others answer "
    "with a local head as it started, so their accuracy is the share of one class and Worst Local is theirs; "
    "federation.never_picked=fit lets them fit that head first."
)

NOVEL_EXPLANATION = (
    "After the last round: Local on each client's own test images, Base on all test images of the classes trained on, Novel "
    "on those of classes kept from the federation, means over clients; HM is the harmonic mean of Base and Novel, HM3 "
    "that of all three."
)


def all_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns of every run, and those that some of these rows have."""
    return COLUMNS + tuple(column for column in SOMETIMES if any(row.values.get(column.key) for row in rows))


def columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Those of a table for people. Final figures and means of the last rounds are named apart, or are one."""
    rounds = averaged(rows)
    renamed = [
        replace(column, title=mean_title(column.title, rounds)) if column.key in ("average", "worst") else column
        for column in all_columns(rows)
    ]
    return tuple(column for column in renamed if rounds != 1 or column.key not in FINAL)


def averaged(rows: Sequence[Row]) -> int | None:
    """Number of last rounds that the figures of all these rows are means of; None where rows differ."""
    found = {max(1, row.evaluations) for row in rows} or {1}
    return found.pop() if len(found) == 1 else None


def comparison(runs: Sequence[Run]) -> list[Row]:
    """One row per family in the order given; runs that stopped early get a separate row."""
    return [row_of(family) for family in families(runs)]


def row_of(family: Family) -> Row:
    each = [figures(run) for run in family.runs]
    return Row(
        label=family.label,
        family=family.digest,
        seeds=tuple(run.config.seed for run in family.runs),
        rounds=family.rounds,
        of=family.of,
        ended=family.ended,
        head=head_of(family.runs[0]),
        images=_images(family),
        tuned=family.runs[0].config.tuned,
        values={column.key: spread(values[column.key] for values in each) for column in (*COLUMNS, *SOMETIMES)},
        settings=family.settings,
        repeated=family.repeated,
        attacked=any(run.config.attack is not None for run in family.runs),
        refused=dict(sum((Counter(run.refused()) for run in family.runs), Counter[str]())),
        absent=sum(run.absent() for run in family.runs),
        coverage=min((part for run in family.runs if (part := run.coverage())), key=_share, default=None),
        epsilon=max((spent for run in family.runs if (spent := run.epsilon()) is not None), default=None),
        warnings=tuple(dict.fromkeys(text for run in family.runs for text in run.warnings())),
        evaluations=max(run.summary().get("evaluations", 1) for run in family.runs),
    )


def head_of(run: Run) -> str:
    """Where the head of a run is kept: `local`, `shared`, `shared_then_finetune`, or empty for a method without one."""
    variant = None if run.config.variant is None else run.config.variant["name"]
    if variant == "fedbabu":
        return "shared_then_finetune"
    return "local" if variant in LOCAL_HEAD else str(run.config.method.get("head", ""))


def _share(found: Coverage) -> float:
    return found.tested / found.of


def _images(family: Family) -> str:
    if family.runs[0].config.federation.evaluate_on == "test":
        return "test"
    if any(run.final_test is None for run in family.runs):
        return "validation"
    chosen = (
        "the round that was best on"
        if family.runs[0].config.federation.select == "best"
        else "the last round; rounds had"
    )
    return f"once, with {chosen} validation images"


def given(tuned: TunedConfig) -> str:
    """What a method was given to find its settings."""
    ended = f"{tuned.pruned} ended early" + (f", {tuned.diverged} diverged" if tuned.diverged else "")
    cost = f"{tuned.rounds} rounds, {tuned.image_passes} image passes, {tuned.seconds:.0f} s"
    return f"{tuned.trials} trials ({ended}), {cost}"


def unequal(each: Sequence[TunedConfig]) -> list[str]:
    """In what the tuning of some rows differs."""
    fields = {"trials": "trials", "rounds": "rounds", "image_passes": "image passes", "objective": "objective"}
    found = {name: sorted({getattr(tuned, field) for tuned in each}) for field, name in fields.items()}
    return [f"{name} {' and '.join(map(str, values))}" for name, values in found.items() if len(values) > 1]


def figures(run: Run) -> dict[str, float | None]:
    """The numbers of one run, by column key."""
    summary, novel = run.summary(), stored_figures(run.reader) or {}
    trained = [record for record in run.rounds() if record.cohort]  # no client trains in round 0
    participations = sum(len(record.cohort) for record in trained)
    return {
        **{column.key: summary.get(column.key) for column in (*COLUMNS, *PICKED_COLUMNS)},
        **{column.key: novel.get(column.key) for column in NOVEL_COLUMNS},
        "bytes_up_each": sum(record.bytes_up for record in trained) / participations if trained else None,
        "bytes_down_each": sum(record.bytes_down for record in trained) / participations if trained else None,
        "bytes_total": float(summary["bytes_up"] + summary["bytes_down"]),
        "seconds": sum(summary["seconds"].values()),
    }


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes that a reader needs before comparing the rows."""
    named = [(row.label, row.settings) for row in rows]
    task = disagreements(named, TASK)
    budget = [line for line in disagreements(named, BUDGET) if line not in task]
    heads: dict[str, list[str]] = {}
    for row in rows:
        heads.setdefault(row.head or "none", []).append(row.title)
    kinds = [f"{kind} ({', '.join(titles)})" for kind, titles in heads.items()] if len(heads) > 1 else []
    level = any(close(rows, column.key) for column in all_columns(rows) if column.best)
    newcomers = [row.title for row in rows if row.settings["federation.held_out"]]
    if newcomers and len(newcomers) == len(rows):
        newcomers = ["all rows"]
    some = [(row.title, row.settings["federation.evaluate_clients"]) for row in rows]
    fitted = [row.title for row in rows if row.settings.get("federation.never_picked") == "fit"]
    early = [row.title for row in rows if not row.finished]
    repeated = [name for row in rows for name in row.repeated]
    attacked = [row.title for row in rows if row.attacked]
    refused = [
        f"{row.title}: " + ", ".join(f"{count} for {rule}" for rule, count in sorted(row.refused.items()))
        for row in rows
        if row.refused
    ]
    absent = [f"{row.title}: {row.absent} times" for row in rows if row.absent]
    missing = [f"{row.title}: {row.coverage.sentence()}" for row in rows if row.coverage]
    validation = [row.title for row in rows if row.images == "validation"]
    once = [f"{row.title}: {row.images}" for row in rows if row.images not in ("test", "validation")]
    tuned = [f"{row.title}: {given(row.tuned)}" for row in rows if row.tuned is not None]
    untuned = [row.title for row in rows if row.tuned is None] if tuned else []
    private = [f"{row.title}: {row.epsilon:.3g}" for row in rows if row.epsilon is not None]
    lines = [
        ("Not comparable, these settings differ", task),
        ("Different training budget or measurement", budget),
        ("Heads differ, and bold is the best of each kind of head", [" | ".join(kinds)] if kinds else []),
        (f"{LEVEL} is behind the bold one by less than the larger of both standard deviations", [""] if level else []),
        ("Only clients held out of training are evaluated", newcomers),
        ("Clients that were never picked fit their local head before they are evaluated", fitted),
        ("Clients that are evaluated for all, drawn once", [f"{who}: {count}" for who, count in some if count]),
        ("Some clients are malicious, and only the others are evaluated", attacked),
        ("Accuracies of validation images, not of test images", validation),
        ("Test images were read", once),
        ("Settings tuned on validation images", tuned),
        ("Settings not tuned", untuned),
        ("Not tuned equally", unequal([row.tuned for row in rows if row.tuned is not None])),
        ("Not every client was tested, so Worst Local can be lower", missing),
        ("Clients that were picked and absent", absent),
        ("Updates refused by the guard", refused),
        ("Warnings", [f"{row.title}: {text}" for row in rows for text in row.warnings]),
        ("Differential privacy, epsilon spent", private),
        ("Unfinished", early),
        ("Left out, the same seed is already counted", repeated),
    ]
    return [safe_line(f"{title}: {'; '.join(items)}".removesuffix(": ")) for title, items in lines if items]


def winners(rows: Sequence[Row], key: str) -> set[int]:
    """Numbers of the rows with the largest mean as printed, among finished rows with the same head on the same task.

    A single row is not among them.
    """
    return {number for numbers in ranked(rows, key) for number in _top(rows, numbers, key)}


def close(rows: Sequence[Row], key: str) -> set[int]:
    """Numbers of the rows behind a winner by less than the larger of both standard deviations over seeds."""
    found = set()
    for numbers in ranked(rows, key):
        top = _top(rows, numbers, key)
        best = rows[top[0]].values[key]
        for number in numbers:
            value = rows[number].values[key]
            assert best is not None
            assert value is not None
            reach = max(best.std or 0.0, value.std or 0.0)
            if number not in top and best.mean - value.mean < reach:
                found.add(number)
    return found


def ranked(rows: Sequence[Row], key: str) -> list[list[int]]:
    """Numbers of the finished rows that can be ranked with each other: the same task and the same head, at least two."""
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        value = row.values.get(key)
        whole = row.coverage is None or key not in WORST
        if row.finished and whole and value is not None and math.isfinite(value.mean):
            kind = json.dumps([section(row.settings, TASK), row.head], sort_keys=True)
            groups.setdefault(kind, []).append(number)
    return [numbers for numbers in groups.values() if len(numbers) > 1]


def _top(rows: Sequence[Row], numbers: Sequence[int], key: str) -> list[int]:
    def printed(number: int) -> float:
        value = rows[number].values[key]
        return round(100 * value.mean, 2) if value is not None else -math.inf

    best = max(map(printed, numbers))
    return [number for number in numbers if printed(number) == best]


@dataclass(frozen=True)
class Cell:
    """Text for a table of any format, before escaping."""

    text: str
    bold: bool = False


def header(columns: Sequence[Column] = COLUMNS) -> list[str]:
    return ["Method", *(column.title for column in columns), "Seeds", "Rounds"]


def cells(rows: Sequence[Row], columns: Sequence[Column] = COLUMNS) -> list[list[Cell]]:
    """The table as people read it; each output format below only escapes and draws lines."""
    best = {column.key: winners(rows, column.key) if column.best else set() for column in columns}
    level = {column.key: close(rows, column.key) if column.best else set() for column in columns}
    table = []
    for number, row in enumerate(rows):
        line = [Cell(safe_line(row.title))]
        for column in columns:
            value = row.values.get(column.key)
            text = NOTHING if value is None else column.write(value)
            before = AT_MOST if row.coverage and value is not None and column.key in WORST else ""
            behind = f" {LEVEL}" if number in level[column.key] else ""
            line.append(Cell(f"{before}{text}{behind}", number in best[column.key]))
        table.append([*line, Cell(str(len(row.seeds))), Cell(str(row.rounds))])
    return table


def explanations(rows: Sequence[Row]) -> list[str]:
    """What the columns mean."""
    last = "" if (rounds := averaged(rows)) is None else f"{rounds} "
    means = (
        f"Final figures are those of the last evaluated round, all others are means of the last {last}evaluated rounds."
    )
    text = EXPLANATION.format(over="All are those of the last evaluated round." if rounds == 1 else means)
    shown = all_columns(rows)
    more = ((PICKED_COLUMNS, PICKED_EXPLANATION), (NOVEL_COLUMNS, NOVEL_EXPLANATION))
    return [text, *(each for group, each in more if any(column in shown for column in group))]
