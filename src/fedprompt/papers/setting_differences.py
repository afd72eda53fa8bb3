"""Differences between our grid and the paper's: settings, and rows and columns that were not run.

The paper's side is the config at its own size, so the differences are the effects of a scale and overrides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedprompt.papers.provenance import without_path
from fedprompt.papers.published_numbers import Published
from fedprompt.papers.table_layout import COLUMN_SECTIONS, Place, written_or_missing
from fedprompt.runs.families import Settings, inside

# the most important settings, in the words of a paper
TITLES = {
    "data.source": "data",
    "backbone.name": "backbone",
    "backbone.image_size": "image size",
    "backbone.stem": "first blocks without prompts",
    "partition.clients": "clients",
    "federation.fraction": "share of clients in a round",
    "federation.rounds": "rounds",
    "train.epochs": "local epochs",
    "train.batch_size": "batch size",
    "data.train_per_cell": "training images of each domain and class",
    "data.test_per_cell": "test images of each domain and class",
}
ALL_WHEN_ABSENT = ("data.train_per_cell", "data.test_per_cell", "data.classes", "data.per_domain", "partition.shots")
SECTIONS = (*COLUMN_SECTIONS, "train")
LONGEST = 60


def differences(ours: Sequence[Settings], theirs: Sequence[Settings], published: Published) -> list[str]:
    """Sentences about the settings, one for those that matter most and one for the rest."""
    matched = all(any(column.holds(settings) for column in published.columns) for settings in ours)
    told_by_columns = {name for column in published.columns for name in column.where} if matched else set()
    names = dict.fromkeys([*TITLES, *sorted({name for settings in (*ours, *theirs) for name in settings})])
    found = {
        name: f"{_values(theirs, name)}, here {_values(ours, name)}"
        for name in names
        if any(inside(name, section) for section in SECTIONS)
        and name not in told_by_columns
        and _all(theirs, name) != _all(ours, name)
    }
    main = [f"{title} {found.pop(name)}" for name, title in TITLES.items() if name in found]
    rest = [f"{name} {text}" for name, text in found.items()]
    lines = [("Not the paper's setting", main), ("Other settings that differ", rest)]
    return [f"{title}: {'; '.join(parts)}." for title, parts in lines if parts]


def method_differences(ours: Iterable[tuple[Place, Settings]], theirs: Iterable[tuple[Place, Settings]]) -> list[str]:
    """One sentence on settings of methods, row by row of the table."""
    mine, others = _by_row(ours), _by_row(theirs)
    found: dict[str, list[str]] = {}
    for row in mine:
        names = {name for settings in (*mine[row], *others.get(row, [])) for name in settings}
        for name in sorted(name for name in names if name.startswith("method.") and row in others):
            if _all(mine[row], name) != _all(others[row], name):
                difference = f"{name[7:]} {_values(others[row], name)}, here {_values(mine[row], name)}"
                found.setdefault(difference, []).append(row)
    parts = [f"{difference} ({', '.join(rows)})" for difference, rows in found.items()]
    return [f"Settings of methods: {'; '.join(parts)}."] if parts else []


def not_run(ours: Sequence[Place], theirs: Sequence[Place], published: Published) -> list[str]:
    """Rows and columns of the paper that we have no run for."""
    lines = []
    for what, part in (("columns", "column"), ("rows", "row")):
        wanted = [entry.title for entry in getattr(published, what)] or [getattr(place, part) for place in theirs]
        ran = {getattr(place, part) for place in ours}
        missing = [title for title in dict.fromkeys(wanted) if title not in ran]
        if missing and ran & set(wanted):
            lines.append(f"Not run here: {', '.join(missing)}.")
        elif missing:
            lines.append(f"None of the paper's {what} was run: {', '.join(missing)}.")
    return lines


def _by_row(grid: Iterable[tuple[Place, Settings]]) -> dict[str, list[Settings]]:
    rows: dict[str, list[Settings]] = {}
    for place, settings in grid:
        rows.setdefault(place.row, []).append(settings)
    return rows


def _all(grid: Sequence[Settings], name: str) -> set[str]:
    return {written_or_missing(settings, name) for settings in grid}


def _values(grid: Sequence[Settings], name: str) -> str:
    """The values of a setting in a grid, in its order."""
    values = dict.fromkeys(written_or_missing(settings, name) for settings in grid)
    text = ", ".join(_told(value, name) for value in values)
    return text if len(text) <= LONGEST else f"{len(values)} values" if len(values) > 1 else f"{text[:LONGEST]}…"


def _told(value: str, name: str) -> str:
    if value in ("", "null"):
        return "all" if name in ALL_WHEN_ABSENT else "not set"
    return str(without_path(value))
