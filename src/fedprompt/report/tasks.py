"""Runs by task: figures of runs on other data, partitions, backbones or evaluations are never in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fedprompt.report.comparison_table import Row, row_of
from fedprompt.report.method_grid import FOUND, telling
from fedprompt.report.paired_differences import Paired, paired, require_known
from fedprompt.runs.families import TASK, Settings, families, section, settings_of, written
from fedprompt.runs.run import Run

SCHEME = "partition.scheme"
SCHEMES = {  # settings of a partition that only some schemes read
    "partition.domains_per_client": ("domains",),
    "partition.classes_per_client": ("classes",),
    "partition.alpha": ("dirichlet", "dirichlet_in_domains"),
    "partition.subsets": ("label_subsets",),
    "partition.subsets_per_client": ("label_subsets",),
    "partition.shots": ("disjoint",),
    "partition.last_takes_rest": ("disjoint",),
}
THINGS = {"data.fingerprint": "images", "backbone.digest": "weights"}  # what a digest identifies


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


def in_words(tasks: Sequence[Settings]) -> list[str]:
    """`office_caltech10, domains per client 2` for every task: the fewest settings that tell them apart.

    A digest is not shown: other files under the same name are `other images (2)`, by their first appearance.
    """
    read = [{field: value for field, value in each.items() if _is_read(field, each)} for each in tasks]
    fields = telling(read if len({json.dumps(each, sort_keys=True) for each in read}) == len(tasks) else tasks)
    if any(field in SCHEMES for field in fields) and len({each.get(SCHEME) for each in tasks}) > 1:
        fields = list(dict.fromkeys([*(field for field in fields if field.startswith("data.")), SCHEME, *fields]))
    versions = {field: list(dict.fromkeys(written(each.get(field)) for each in tasks)) for field in FOUND}
    return [
        ", ".join(_worded(field, each.get(field), versions) for field in fields if _is_read(field, each))
        for each in tasks
    ]


def _is_read(field: str, settings: Settings) -> bool:
    """Whether the scheme of the partition reads the setting; schemes of other packages may read all."""
    known = {"iid", "manifest", *(name for names in SCHEMES.values() for name in names)}
    scheme = settings.get(SCHEME)
    return scheme not in known or scheme in SCHEMES.get(field, (scheme,))


def _worded(field: str, value: Any, versions: dict[str, list[str]]) -> str:
    if field in FOUND:
        place = versions[field].index(written(value)) + 1
        return f"first {THINGS[field]}" if place == 1 else f"other {THINGS[field]} ({place})"
    name = field.rpartition(".")[2].replace("_", " ")
    if field in ("data.source", "backbone.name"):
        return PurePath(str(value)).stem or str(value)  # paths of this machine are not published
    if field == SCHEME:
        return f"partition {written(value)}".replace("_", " ")
    if value is None:
        return f"no {name}"
    return f"{name} {str(value).lower() if isinstance(value, bool) else written(value)}"
