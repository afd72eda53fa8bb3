"""Runs by task: figures of runs on other data, partitions, backbones or evaluations are never in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fedprompt.report.comparison_table import Row, row_of
from fedprompt.report.paired_differences import Paired, paired, require_known
from fedprompt.report.task_names import in_words
from fedprompt.runs.families import TASK, Settings, families, section, settings_of
from fedprompt.runs.run import Run


@dataclass(frozen=True)
class Task:
    """Rows that can be compared."""

    title: str
    """In words, how it differs from the other tasks; empty if there are no others."""
    rows: tuple[Row, ...]
    against: str | None = None
    """The row that all others are compared with, as it was asked for; None if no row was named."""
    pairs: tuple[Paired, ...] = ()
    """The other rows less that row."""


def by_task(runs: Sequence[Run], against: str | None = None) -> list[Task]:
    """Tasks in order of first appearance; labels tell the rows of one task apart."""
    groups: dict[str, list[Run]] = {}
    settings: dict[str, Settings] = {}
    for run in runs:
        found = section(settings_of(run), TASK)
        key = json.dumps(found, sort_keys=True)
        groups.setdefault(key, []).append(run)
        settings[key] = found
    titles = in_words(list(settings.values()))
    rows = [families(members) for members in groups.values()]
    if against is not None:
        require_known(rows, against)
    return [
        Task(title, tuple(map(row_of, each)), against, () if against is None else tuple(paired(each, against)))
        for title, each in zip(titles, rows, strict=True)
    ]
