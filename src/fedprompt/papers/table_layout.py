"""The place of each run of a grid in the table: its row and column, and their titles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fedprompt.papers.published_numbers import MISSING, SOURCE, Entry, Published, match
from fedprompt.runs.families import Settings, inside, written

# sections whose settings define columns; all others define rows, unless the paper's table differs
COLUMN_SECTIONS = ("data", "partition", "backbone", "federation")


@dataclass(frozen=True)
class Place:
    """A cell of the table, with the paper's figures."""

    row: str
    column: str
    row_entry: Entry | None = None
    column_entry: Entry | None = None


def places(grid: Sequence[Settings], published: Published) -> list[Place]:
    """For each run of a grid, known by its settings, its place. Rows and columns of the paper keep the paper's titles.

    Without a title in the paper, a row is named by its method, a column by the settings that differ.
    """
    conditions = {name for row in published.rows for name in row.where}
    for_columns = {name for column in published.columns for name in column.where}

    def is_column(name: str) -> bool:
        return name in for_columns or (name not in conditions and any(inside(name, each) for each in COLUMN_SECTIONS))

    names = varied(grid)
    row_names, column_names = [n for n in names if not is_column(n)], [n for n in names if is_column(n)]
    row_entries = [match(published.rows, settings) for settings in grid]
    column_entries = [match(published.columns, settings) for settings in grid]
    called = [
        entry.title if entry else _column_title(settings, column_names, published.columns)
        for settings, entry in zip(grid, column_entries, strict=True)
    ]
    methods = [e.title if e else method_label(s) for s, e in zip(grid, row_entries, strict=True)]
    columns = _told_apart(called, grid, column_names, [""] * len(grid))
    rows = _told_apart(methods, grid, row_names, columns)
    return [Place(*each) for each in zip(rows, columns, row_entries, column_entries, strict=True)]


def varied(grid: Sequence[Settings]) -> list[str]:
    """The settings that differ inside the grid."""
    names = dict.fromkeys(name for settings in grid for name in settings)
    return [name for name in names if len({written_or_missing(settings, name) for settings in grid}) > 1]


def written_or_missing(settings: Settings, name: str) -> str:
    value = settings.get(name, MISSING)
    return "" if value is MISSING else written(value)


def method_label(settings: Settings) -> str:
    """`fedvpt`, or `fedvpt+fedprox`."""
    variant = settings.get("variant.name")
    return f"{settings['method.name']}+{variant}" if variant else str(settings["method.name"])


def source_name(source: str) -> str:
    """A data set in a title: a file name without folder and ending."""
    return source if source.startswith("hub:") else PurePath(source).stem


def _column_title(settings: Settings, names: Sequence[str], columns: Sequence[Entry]) -> str:
    parts = [_like_the_papers(settings, name, columns) for name in names if name in settings]
    return ", ".join(parts) or source_name(str(settings[SOURCE]))


def _like_the_papers(settings: Settings, name: str, columns: Sequence[Entry]) -> str:
    """`s = 2` where the paper has `s = 5`; else the name of the setting and its value."""
    value = written(settings[name])
    for column in columns:
        theirs = written(column.where.get(name))
        if list(column.where) == [name] and theirs in column.title:
            return column.title.replace(theirs, value)
    return source_name(value) if name == SOURCE else f"{_last(name)} {value}"


def _last(name: str) -> str:
    return name.removesuffix(".*").split(".")[-1]


def _told_apart(
    titles: Sequence[str], grid: Sequence[Settings], names: Sequence[str], places: Sequence[str]
) -> list[str]:
    """The titles, with the settings that differ where several kinds of runs share one in one of the places.

    A setting with one value in every column, such as fewer epochs for the larger set, tells no rows apart.
    """
    members: dict[str, dict[str, list[Settings]]] = {}
    for title, place, settings in zip(titles, places, grid, strict=True):
        members.setdefault(title, {}).setdefault(place, []).append(settings)
    differing = {
        title: {name for group in found.values() for name in varied(group)} for title, found in members.items()
    }
    result = []
    for title, settings in zip(titles, grid, strict=True):
        shown = [name for name in names if name in differing[title] and name in settings]
        result.append(", ".join([title, *(f"{_last(name)} {written(settings[name])}" for name in shown)]))
    return result
