"""Families as papers print them: methods down the side, settings such as data sets or partitions across the top.

A column is one task; accuracies can be compared only within a column. If the runs fill at least half of such a table it
is a grid, and gets its own table. Plots are always drawn column by column, and a method keeps its colour in all of
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedprompt.metrics.accuracy import mean_title
from fedprompt.report.comparison_table import (
    LEVEL,
    NOTHING,
    Cell,
    Row,
    averaged,
    close,
    notes,
    percent,
    row_of,
    winners,
)
from fedprompt.report.task_names import in_words, telling
from fedprompt.runs.families import TASK, Family, Settings, families, flatten, found_by, section, written
from fedprompt.runs.run import Run

WIDE = ("data", "partition", "backbone", "federation", "attack", "privacy")  # what papers vary across the top
PAIR = ("average", "worst")  # figures that are side by side in every column
TITLES = {"average": "Average", "worst": "Worst Local"}
UNFINISHED = "†"


@dataclass(frozen=True)
class Column:
    """One task, and its families by row number."""

    label: str
    """Empty with only one column."""
    families: dict[int, Family]


@dataclass(frozen=True)
class Arrangement:
    """All runs, by row and column."""

    fields: tuple[str, ...]
    """The settings that columns are named by."""
    columns: tuple[Column, ...]
    labels: tuple[str, ...]
    """Of the rows."""
    left_out: tuple[Family, ...] = ()
    """Families that stopped earlier than others in the same cell."""

    @property
    def is_grid(self) -> bool:
        """Several methods on several tasks, at least half of all combinations, and none of them only once."""
        cells = sum(len(column.families) for column in self.columns)
        rows, columns = len(self.labels), len(self.columns)
        return rows > 1 and columns > 1 and 2 * cells >= rows * columns and cells > max(rows, columns)

    @cached_property
    def rows(self) -> list[dict[int, Row]]:
        """The figures of each column, by number of the row."""
        return [{number: row_of(family) for number, family in column.families.items()} for column in self.columns]


def arrange(runs: Sequence[Run]) -> Arrangement:
    """A grid over the settings that papers vary if the runs form one; else over the tasks, which never share a column."""
    wide = _arranged(families(runs, *WIDE), WIDE)
    if wide.is_grid:
        return wide
    narrow = _arranged(families(runs, *TASK), TASK)
    return narrow if narrow.is_grid else _arranged(families(runs, *TASK), TASK, folded=False)


def _arranged(groups: Sequence[Family], names: Sequence[str], folded: bool = True) -> Arrangement:
    """Families by label and task. Folded, a cell holds only the family with the most rounds."""
    tasks: dict[str, list[Family]] = {}
    settings: dict[str, Settings] = {}
    for family in groups:
        found = section(_settings(family), names)
        key = json.dumps(found, sort_keys=True)
        tasks.setdefault(key, []).append(family)
        settings[key] = found
    fields = telling(list(settings.values()))
    labels = list(dict.fromkeys(family.label if folded else family.title for family in groups))
    columns, left_out = [], []
    titles = dict(zip(settings, in_words(list(settings.values())), strict=True))
    for key in sorted(tasks, key=lambda key: _order(settings[key], fields)):
        members: dict[int, Family] = {}
        for family in tasks[key]:
            number = labels.index(family.label if folded else family.title)
            other = members.get(number)
            farther = other is None or other.rounds < family.rounds
            members[number] = family if other is None or farther else other
            left_out += [] if other is None else [other if farther else family]
        columns.append(Column(titles[key], dict(sorted(members.items()))))
    return Arrangement(tuple(fields), tuple(columns), tuple(labels), tuple(left_out))


def _settings(family: Family) -> Settings:
    run = family.runs[0]
    return flatten(run.config.model_dump(mode="json", include=set(WIDE))) | found_by(run)


def _order(settings: Settings, fields: Sequence[str]) -> list[tuple[int, float, str]]:
    """Numbers by size, everything else by name, absent values first."""
    order = []
    for field in fields:
        value = settings.get(field)
        number = float(value) if isinstance(value, int | float) else None
        rank = 0 if value is None else 1 if number is None else 2
        order.append((rank, number or 0.0, written(value)))
    return order


def grid_cells(grid: Arrangement) -> list[list[Cell]]:
    """One line a method: Average and Worst Local in every column, the best of each column in bold."""
    best = [{key: _numbers(winners, rows, key) for key in PAIR} for rows in grid.rows]
    level = [{key: _numbers(close, rows, key) for key in PAIR} for rows in grid.rows]
    table = []
    for number, label in enumerate(grid.labels):
        line = [Cell(label)]
        for rows, chosen, behind in zip(grid.rows, best, level, strict=True):
            marks = {key: f" {LEVEL}" if number in behind[key] else "" for key in PAIR}
            line += [Cell(_written(rows.get(number), key) + marks[key], number in chosen[key]) for key in PAIR]
        table.append(line)
    return table


def _numbers(choice: Callable[[Sequence[Row], str], set[int]], rows: dict[int, Row], key: str) -> set[int]:
    numbers = list(rows)
    return {numbers[place] for place in choice([rows[number] for number in numbers], key)}


def _written(row: Row | None, key: str) -> str:
    value = row.values.get(key) if row else None
    if row is None or value is None:
        return NOTHING
    return percent(value) + ("" if row.finished else f" {UNFINISHED}")


def remarks(grid: Arrangement) -> list[str]:
    """Notes that a reader of the grid needs."""
    seeds = sorted({len(row.seeds) for rows in grid.rows for row in rows.values()})
    several = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
    over = "of one seed" if several == "1" else f"mean ± sample standard deviation over {several} seeds"
    figures = mean_title("Average and Worst Local", averaged([row for rows in grid.rows for row in rows.values()]))
    lines = [f"{figures} in per cent, {over}; columns differ in {', '.join(grid.fields)}."]
    if any(not row.finished for rows in grid.rows for row in rows.values()):
        lines.append(f"{UNFINISHED} stopped before its last round.")
    if grid.left_out:
        names = [run.name for family in grid.left_out for run in family.runs]
        lines.append(f"Left out, others of the same setting got farther: {', '.join(names)}.")
    return lines


def warnings(grid: Arrangement) -> list[str]:
    """Reasons why the rows of one column cannot be compared."""
    by_column = (
        (column.label, note)
        for column, rows in zip(grid.columns, grid.rows, strict=True)
        for note in notes([*rows.values()])
    )
    where: dict[str, list[str]] = {}
    for label, note in by_column:
        where.setdefault(note, []).append(label)
    everywhere = len(grid.columns)
    return [note if len(labels) == everywhere else f"{', '.join(labels)}: {note}" for note, labels in where.items()]
