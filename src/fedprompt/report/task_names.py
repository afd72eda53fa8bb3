"""What a task is called: in words, by the fewest settings that tell it from the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from fedprompt.runs.families import Settings, written

FOUND = ("data.fingerprint", "backbone.digest")  # they name tasks only if no setting differs
PLACES = ("data", "partition", "backbone", "federation")  # sections whose fields need no section beside them
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


def in_words(tasks: Sequence[Settings]) -> list[str]:
    """`office_caltech10, domains per client 2` for every task: the fewest settings that tell them apart.

    A digest is not shown: other files under the same name are `other images (2)`, by their first appearance.
    """
    read = [{field: value for field, value in each.items() if _is_read(field, each)} for each in tasks]
    if len({json.dumps(each, sort_keys=True) for each in read}) < len(tasks):
        read = list(tasks)  # they differ in nothing that matters
    fields = telling(read)
    if any(field in SCHEMES for field in fields) and len({each.get(SCHEME) for each in tasks}) > 1:
        fields = list(dict.fromkeys([*(field for field in fields if field.startswith("data.")), SCHEME, *fields]))
    versions = {field: list(dict.fromkeys(written(each.get(field)) for each in tasks)) for field in FOUND}
    return [
        ", ".join(
            _worded(field, each.get(field), versions) for field in fields if field in each or field not in SCHEMES
        )
        for each in read
    ]


def _is_read(field: str, settings: Settings) -> bool:
    """Whether the scheme of the partition reads the setting; schemes of other packages may read all."""
    known = {"iid", "manifest", *(name for names in SCHEMES.values() for name in names)}
    scheme = settings.get(SCHEME)
    return scheme not in known or scheme in SCHEMES.get(field, (scheme,))


def _worded(field: str, value: Any, versions: dict[str, list[str]]) -> str:
    if field in FOUND:
        version = versions[field].index(written(value)) + 1
        return f"first {THINGS[field]}" if version == 1 else f"other {THINGS[field]} ({version})"
    place, _, leaf = field.partition(".")
    name = (leaf if place in PLACES and leaf else field).replace("_", " ").replace(".", " ")
    if field in ("data.source", "backbone.name"):
        return PurePath(str(value)).stem or str(value)  # paths of this machine are not published
    if field == SCHEME:
        return f"partition {written(value)}".replace("_", " ")
    if value is None:
        return f"no {name}"
    return f"{name} {str(value).lower() if isinstance(value, bool) else written(value)}"


def telling(settings: Sequence[Settings]) -> list[str]:
    """The fewest settings that distinguish some tasks, the simplest first."""
    varied = [
        field
        for field in dict.fromkeys(field for each in settings for field in each)
        if len({written(each.get(field)) for each in settings}) > 1
    ]
    plain = ("data.source", "partition.scheme", "partition.")
    varied.sort(key=lambda field: (field in FOUND, *(not field.startswith(name) for name in plain), field))
    chosen: list[str] = []
    while varied and _told_apart(settings, chosen) < len(settings):
        best = max(varied, key=lambda field: _told_apart(settings, [*chosen, field]))  # the first of equals
        chosen.append(best)
        varied.remove(best)
    return sorted(chosen, key=lambda field: (not field.startswith("data."), field))


def _told_apart(settings: Sequence[Settings], fields: Sequence[str]) -> int:
    return len({tuple(written(each.get(field)) for field in fields) for each in settings})
