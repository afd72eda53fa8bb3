"""Numbers a paper published, and which of our runs they belong to.

A row and a column have conditions: settings with the value, or the list of values, that a run must have. Of those whose
conditions hold, the one with the most conditions counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from fedprompt.errors import ConfigError, broken
from fedprompt.papers.result_file import Figure, domain_key

SOURCE = "data.source"  # also matched by the stem of its file
FIGURES = ("average", "worst")
DOMAINS = "domains"  # of a row: for each column a mapping from domains to figures
MISSING = object()
NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:±\s*(\d+(?:\.\d+)?)\s*)?")


@dataclass(frozen=True)
class Entry:
    """A row or a column of a paper's table."""

    title: str
    where: Mapping[str, Any]
    figures: Mapping[str, Sequence[Figure | None]] = field(default_factory=dict)
    """Of a row, by column."""

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether a run with these settings, written `section.field`, belongs here."""
        return all(_agrees(name, settings.get(name, MISSING), wanted) for name, wanted in self.where.items())


@dataclass(frozen=True)
class Published:
    """A paper's table; without rows if it is not known to us."""

    paper: str | None = None
    notes: tuple[str, ...] = ()
    columns: tuple[Entry, ...] = ()
    rows: tuple[Entry, ...] = ()

    def figures(self, row: Entry | None, column: Entry | None) -> dict[str, Figure]:
        """The paper's figures in one cell of its table."""
        if row is None or column is None:
            return {}
        place = self.columns.index(column)
        return {key: value for key, values in row.figures.items() if (value := values[place]) is not None}


def match(entries: Sequence[Entry], settings: Mapping[str, Any]) -> Entry | None:
    """The entry that a run belongs to: the first of those with the most conditions."""
    return max((each for each in entries if each.holds(settings)), key=lambda each: len(each.where), default=None)


def _agrees(name: str, value: Any, wanted: Any) -> bool:
    choices = wanted if isinstance(wanted, list) else [wanted]
    if name == SOURCE and isinstance(value, str):
        return value in choices or PurePath(value).stem in choices
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def read(values: Any) -> Published:
    """The section `published` of a config."""
    if values is None:
        return Published()
    _check("published", values, dict)
    _only(values, "published", ("paper", "notes", "columns", "rows"))
    columns = tuple(
        _entry(raw, f"published.columns.{number}", 0)
        for number, raw in enumerate(_check("published.columns", values.get("columns", []), list))
    )
    rows = tuple(
        _entry(raw, f"published.rows.{number}", len(columns))
        for number, raw in enumerate(_check("published.rows", values.get("rows", []), list))
    )
    for what, entries in (("columns", columns), ("rows", rows)):
        titles = [each.title for each in entries]
        for title in {title for title in titles if titles.count(title) > 1}:
            raise ConfigError(broken(f"published.{what}", "have every title once", title))
    notes = [_check("published.notes", note, str) for note in _check("published.notes", values.get("notes", []), list)]
    return Published(_check("published.paper", values.get("paper"), str), tuple(notes), columns, rows)


def _entry(raw: Any, where: str, columns: int) -> Entry:
    _check(where, raw, dict)
    _only(raw, where, ("title", "where", *((*FIGURES, DOMAINS) if columns else ())))
    figures = {key: _figures(raw[key], f"{where}.{key}", columns) for key in FIGURES if key in raw}
    figures |= _by_domain(raw.get(DOMAINS), f"{where}.{DOMAINS}", columns)
    title = _check(f"{where}.title", raw.get("title"), str)
    return Entry(title, _check(f"{where}.where", raw.get("where"), dict), figures)


def _figures(raw: Any, where: str, columns: int) -> tuple[Figure | None, ...]:
    return tuple(_figure(value, where) for value in _by_column(raw, where, columns))


def _by_domain(raw: Any, where: str, columns: int) -> dict[str, tuple[Figure | None, ...]]:
    """The figures of single domains, by key."""
    if raw is None:
        return {}
    by_column = [_check(where, value or {}, dict) for value in _by_column(raw, where, columns)]
    names = dict.fromkeys(name for values in by_column for name in values)
    return {domain_key(str(name)): tuple(_figure(values.get(name), where) for values in by_column) for name in names}


def _by_column(raw: Any, where: str, columns: int) -> list[Any]:
    values: list[Any] = _check(where, raw, list)
    if len(values) != columns:
        raise ConfigError(broken(where, f"have a value for each of the {columns} columns", len(values)))
    return values


def _figure(value: Any, where: str) -> Figure | None:
    """`84.77` or `62.17 ± 0.12`, in per cent."""
    if value is None:
        return None
    found = NUMBER.fullmatch(str(value))
    if found is None or isinstance(value, bool) or float(found[1]) > 100:
        raise ConfigError(broken(where, "hold percentages such as 84.77 or 62.17 ± 0.12", value))
    mean, std = (None if text is None else round(float(text) / 100, 6) for text in found.groups())
    assert mean is not None
    return Figure(mean=mean, std=std)


def _check(where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        names = {"dict": "a mapping", "list": "a list", "str": "a text"}
        raise ConfigError(broken(where, f"be {names[kind.__name__]}", value))
    return value


def _only(values: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(broken(where, f"hold nothing but {', '.join(known)}", key))
