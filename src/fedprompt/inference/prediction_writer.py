"""Rows of predictions as text: a table for people, CSV and JSON for programs. All are written row by row."""

from __future__ import annotations

import csv
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from fedprompt.errors import ConfigError, StorageError, broken
from fedprompt.inference.exported_client import ExportedClient
from fedprompt.inference.predict import Row, Tally
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.io.safe_text import safe_cell, safe_line

LOOKED_AT = 64  # rows that decide how wide the columns of a table are
WIDEST = 48  # characters of an item's name in a table; a longer name is cut at its start
FORMATS = {".csv": "csv", ".json": "json"}  # of a file, by its suffix


def table_lines(rows: Iterable[Row], classes: Sequence[str], top: int) -> Iterator[str]:
    """A table, printed while predictions arrive."""
    rows = iter(rows)
    first = list(islice(rows, LOOKED_AT))
    item = first[0].item if first else "image"
    name_width = min(WIDEST, max([len(item), *(len(row.name) for row in first)]))
    names = [safe_line(name) for name in classes]
    draws = any(row.mutual_information is not None for row in first)
    count, width = min(top, len(names)), min(24, max(map(len, names)))
    labelled = any(row.label is not None for row in first)
    heads = [f"{place + 1}.".ljust(width + 8) for place in range(count)]
    more = ["entropy", *(["mutual information"] if draws else []), *(["label"] if labelled else [])]
    yield "  ".join([item.ljust(name_width), *heads, *more])
    for row in chain(first, rows):
        name = safe_line(row.name)
        name = name if len(name) <= name_width else "…" + name[1 - name_width :]
        if row.error is not None:
            yield f"{name.ljust(name_width)}  {safe_line(row.error)}"
            continue
        cells = [f"{safe_line(each)[:width].ljust(width)} {100 * share:5.1f} %" for each, share in row.top]
        cells += [f"{row.entropy or 0.0:7.3f}", *([f"{row.mutual_information or 0.0:18.4f}"] if draws else [])]
        if row.label is not None:
            cells.append(safe_line(row.label) + _verdict(row.label, row.top[0][0], classes))
        yield "  ".join([name.ljust(name_width), *cells])


def _verdict(label: str, answer: str, classes: Sequence[str]) -> str:
    if label not in classes:
        return " (no class of the run)"
    return "" if label == answer else " (wrong)"


def csv_lines(rows: Iterable[Row], top: int, item: str = "image") -> Iterator[str]:
    """One line for each item; class and probability by rank."""
    ranks = [f"{what}_{place + 1}" for place in range(top) for what in ("class", "probability")]
    yield _csv([item, "label", *ranks, "entropy", "mutual_information", "error"])
    for row in rows:
        cells = [cell for name, share in row.top for cell in (safe_cell(name), repr(share))]
        cells += [""] * (len(ranks) - len(cells))
        numbers = ["" if value is None else repr(value) for value in (row.entropy, row.mutual_information)]
        texts = [safe_cell(each or "") for each in (row.name, row.label, row.error)]
        yield _csv([*texts[:2], *cells, *numbers, texts[2]])


def json_lines(rows: Iterable[Row], client: TrainedClient | ExportedClient, tally: Tally) -> Iterator[str]:
    """One JSON object, a line for each item; the counts of `tally` come last, when all have been counted."""
    yield json.dumps(client.described())[:-1] + ', "predictions": ['
    before = ""
    for row in rows:
        yield before + json.dumps(row.to_json())
        before = ","
    yield '], "summary": ' + json.dumps(tally.to_json()) + "}"


def format_of(path: Path) -> str:
    """The format of a file."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(broken("--output", "end in .csv or .json", str(path)))
    return FORMATS[path.suffix.lower()]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Lines to a file that appears only when it is complete."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("x", encoding="utf-8", newline="\n")
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror}") from error
    try:
        with file:
            for line in lines:
                _put(file, line, path)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _put(file: io.TextIOBase, line: str, path: Path) -> None:
    try:
        file.write(line + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _csv(cells: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()
