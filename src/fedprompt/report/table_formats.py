"""The comparison as Markdown, CSV, JSON and on a terminal: one table for each task."""

from __future__ import annotations

import csv as comma_separated
import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from fedprompt.io.safe_text import safe_cell, safe_line
from fedprompt.report import paired_table
from fedprompt.report.comparison_table import (
    COLUMNS,
    Cell,
    Column,
    Row,
    Spread,
    all_columns,
    cells,
    columns,
    explanations,
    header,
    notes,
)
from fedprompt.report.paired_differences import Paired
from fedprompt.report.tasks import Task

if TYPE_CHECKING:
    from rich.table import Table

LEFT_OUT_FIRST = ("ece", "bytes_down_each", "bytes_up_each", "final_average")  # on a terminal that is too narrow
EDGES = 2  # characters at both sides of a table
LONGEST_LABEL = 36  # characters of a label before it is folded on a terminal


def markdown(tasks: Sequence[Task]) -> str:
    """GitHub tables with their notes, each task below its heading."""
    rows = [row for task in tasks for row in task.rows]
    parts = []
    for task in tasks:
        shown = columns(task.rows)
        parts += [f"### {markdown_escape(task.title)}"] if task.title else []
        parts.append(markdown_table(header(shown), cells(task.rows, shown)))
        parts += [] if len(tasks) > 1 else explanations(rows)
        parts += map(markdown_escape, notes(task.rows))
        if task.against is not None:
            parts += [markdown_table(paired_table.HEAD, paired_table.cells(task.pairs))] if task.pairs else []
            parts += map(markdown_escape, paired_table.notes(task))
    parts += explanations(rows) if len(tasks) > 1 else []
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], table: Sequence[Sequence[Cell]]) -> str:
    lines = [list(head), ["---"] + ["---:"] * (len(head) - 1)]
    for line in table:
        texts = [markdown_escape(cell.text) for cell in line]
        lines.append([f"**{text}**" if cell.bold else text for text, cell in zip(texts, line, strict=True)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_escape(text: str) -> str:
    for mark in "\\`*<|":
        text = text.replace(mark, f"\\{mark}")
    return safe_line(text)


def json_rows(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Plain values at full precision, for `json.dumps`."""
    everything = [row for task in tasks for row in task.rows]
    return [
        {
            "label": row.label,
            "task": task.title,
            "family": row.family,
            "seeds": list(row.seeds),
            "rounds": row.rounds,
            "of": row.of,
            "finished": row.finished,
            **({"tested": row.coverage.tested, "to_test": row.coverage.of} if row.coverage else {}),
            **({"tuned": row.tuned.model_dump(mode="json")} if row.tuned is not None else {}),
            **{column.key: _plain(row.values.get(column.key)) for column in all_columns(everything)},
            **({} if task.against is None else {"against": paired_table.plain(task, row.title)}),
        }
        for task in tasks
        for row in task.rows
    ]


def _plain(value: Spread | None) -> dict[str, float | None] | None:
    """JSON has no NaN."""
    if value is None:
        return None
    return {name: number if number is None or math.isfinite(number) else None for name, number in asdict(value).items()}


def csv(tasks: Sequence[Task]) -> str:
    """One line per row at full precision: `average` and `average_std`, and so on; seeds are separated by spaces."""
    shown = all_columns([row for task in tasks for row in task.rows])
    against = any(task.against is not None for task in tasks)
    figures = [name for column in shown for name in (column.key, f"{column.key}_std")]
    pair = ["difference", "difference_low", "difference_high", "verdict"] if against else []
    text = io.StringIO()
    writer = comma_separated.writer(text, lineterminator="\n")
    writer.writerow(["label", "task", "family", "seeds", "rounds", "of", "finished", *figures, *pair])
    for task in tasks:
        for row in task.rows:
            found = next((each for each in task.pairs if each.label == row.title), None)
            writer.writerow([*_csv_line(task, row, shown), *(_csv_pair(found) if against else [])])
    return text.getvalue()


def _csv_line(task: Task, row: Row, shown: Sequence[Column]) -> list[object]:
    values = [row.values.get(column.key) for column in shown]
    spreads = [(value.mean, value.std) if value else (None, None) for value in values]
    numbers = [number for pair in spreads for number in pair]
    names = [safe_cell(row.label), safe_cell(task.title), row.family, " ".join(map(str, row.seeds))]
    return [*names, row.rounds, row.of, str(row.finished).lower(), *numbers]


def _csv_pair(found: Paired | None) -> list[object]:
    if found is None:
        return [None] * 4
    interval = found.interval
    return [found.estimate, *((interval.low, interval.high) if interval else (None, None)), found.verdict]


def rich_tables(tasks: Sequence[Task], width: int = 80) -> list[Table]:
    """For the terminal: the columns that fit, the best in bold, notes as the caption."""
    tables = []
    for task in tasks:
        tables.append(_rich_comparison(task, width))
        if task.pairs:
            title = f"Average less that of {safe_line(task.pairs[0].against)}, percentage points"
            table = paired_table.cells(task.pairs)
            tables.append(_rich(title, paired_table.HEAD, table, paired_table.notes(task), width))
    return tables


def _rich_comparison(task: Task, width: int) -> Table:
    """With accuracies on novel classes, only accuracies fit."""
    crowded = all_columns(task.rows) != COLUMNS
    shown = [column for column in columns(task.rows) if column.narrow and (column.best or not crowded)]
    for key in LEFT_OUT_FIRST:
        if sum(_widths(header(shown), cells(task.rows, shown))) + EDGES > width:
            shown = [column for column in shown if column.key != key]
    missing = [] if task.against is None or task.pairs else paired_table.notes(task)
    told = ["per cent, mean ± std over seeds; up and down per client and round", *notes(task.rows), *missing]
    return _rich(safe_line(task.title), header(shown), cells(task.rows, shown), told, width)


def _widths(head: Sequence[str], lines: Sequence[Sequence[Cell]]) -> list[int]:
    """Characters of the columns with the space between them; titles are folded at spaces, labels where they are long."""
    widths = []
    for position, title in enumerate(head):
        widest = max((len(line[position].text) for line in lines), default=0)
        widths.append(2 + max([widest if position else min(widest, LONGEST_LABEL), *map(len, title.split())]))
    return widths


def _rich(
    title: str, head: Sequence[str], lines: Sequence[Sequence[Cell]], caption: Sequence[str], width: int
) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        caption=Text("\n".join(caption)),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    label, *figures = _widths(head, lines)
    fits = [min(label, max(8, width - EDGES - sum(figures))), *figures]
    for position, name in enumerate(head):
        justify: Literal["left", "right"] = "right" if position else "left"
        table.add_column(name, justify=justify, overflow="fold", width=fits[position] - 2)
    for line in lines:
        table.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in line))
    return table
