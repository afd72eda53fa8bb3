"""Image files that a CSV file lists: columns `path` and `label` and, when there, `domain`, `split`, `rank`, `group`, `slice`.

Paths are relative to the folder of the CSV file, and the table cannot name anything outside it. Links that are in the folder
are followed, as in folders of images: they are how sets are put together from other disks, and no part of the table. Values are
separated by commas, semicolons or tabs.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from fedprompt.data.cache import fingerprint
from fedprompt.data.sources.base import NO_DOMAINS, Source, decode, encode_names, encode_splits
from fedprompt.data.sources.image_folder import EXTENSIONS
from fedprompt.data.sources.patients import groups_of_patients
from fedprompt.errors import DataError, broken
from fedprompt.io.bounded_read import read_bytes

MOST_BYTES = 256 * 2**20
MOST_HEAD = 2**16  # characters of the first line
SUFFIXES = (".csv", ".tsv")
SEPARATORS = ",;\t"
COLUMNS = {  # what a column is called, the first name is ours
    "path": ("path", "image", "file", "filename", "file_name", "image_path"),
    "label": ("label", "class", "class_name", "category"),
    "domain": ("domain", "site", "style"),
    "split": ("split",),
    "rank": ("rank",),
    "group": ("group", "patient", "patient_id"),
    "slice": ("slice",),
}
REQUIRED = ("path", "label")


class CsvSource(Source):
    """Images in the order of the rows. Labels are names, also where they are numbers."""

    def __init__(self, path: Path, cache: Path) -> None:
        where = path.name
        columns = read_table(path)
        self.name, self._root = path.stem, path.parent
        self._slices = _whole(columns["slice"], "slice", where) if "slice" in columns else None
        self._files = _inside(columns["path"], columns.get("slice"), path.parent, where)
        self.labels, self.class_names = encode_names(columns["label"], names_in_order(columns["label"]), "label", where)
        self.domains, self.domain_names = np.zeros(len(self._files), dtype=np.int64), NO_DOMAINS
        if "domain" in columns:
            names = names_in_order(columns["domain"])
            self.domains, self.domain_names = encode_names(columns["domain"], names, "domain", where)
        self.splits = encode_splits(columns["split"], where) if "split" in columns else None
        self.ranks = rank_numbers(columns["rank"], where) if "rank" in columns else None
        if "group" in columns:
            self.groups = np.unique(columns["group"], return_inverse=True)[1].astype(np.int64)
        else:
            self.groups = groups_of_patients(path.parent, self._files)
        content = fingerprint.of_tree(path.parent, list(dict.fromkeys(self._files)), cache)
        table = {name: values for name, values in columns.items() if name != "path"}
        self.fingerprint = hashlib.sha256(json.dumps([content, table], sort_keys=True).encode()).hexdigest()

    def image(self, index: int) -> Image.Image:
        path = self._root / self._files[index]
        return decode(path, str(path), None if self._slices is None else int(self._slices[index]))


def csv_file(path: Path) -> Path | None:
    """The path itself if it is a CSV file; of a folder with images side by side, the one CSV file beside them."""
    if path.is_file():
        return path if path.suffix.lower() in SUFFIXES else None
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    tables = [entry for entry in entries if entry.suffix.lower() in SUFFIXES and entry.is_file()]
    flat = any(entry.name.lower().endswith(EXTENSIONS) for entry in entries)
    return tables[0] if len(tables) == 1 and (flat or not any(entry.is_dir() for entry in entries)) else None


def head(path: Path) -> list[str]:
    """The names of the columns; none where the file cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            line = file.readline(MOST_HEAD)
    except (OSError, ValueError):
        return []
    return [name.strip().strip('"').lower() for name in re.split(f"[{SEPARATORS}]", line)]


def read_table(
    path: Path, columns: Mapping[str, Sequence[str]] = COLUMNS, required: Sequence[str] = REQUIRED
) -> dict[str, list[str]]:
    """The columns that are understood, by our name."""
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
        lines = [line for line in csv.reader(io.StringIO(text), delimiter=_separator(text), strict=True) if line]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"data.source must be a readable CSV file in UTF-8: {path}: {error}") from error
    head, rows = ([name.strip().lower() for name in lines[0]], lines[1:]) if lines else ([], [])
    places: dict[str, int] = {}
    for ours, names in columns.items():
        found = [name for name in names if name in head]
        if found and head.count(found[0]) > 1:
            raise DataError(f"{path.name}: " + broken("columns", "have different names", head))
        if not found and ours in required:
            rule = f"include {ours!r} (or {', '.join(names[1:])})"
            raise DataError(f"{path.name}: " + broken("columns", rule, head))
        places |= {ours: head.index(found[0])} if found else {}
    if not rows:
        raise DataError(f"{path.name}: " + broken("rows", "be there below the names of the columns", 0))
    for row, values in enumerate(rows):
        if len(values) != len(head):
            raise DataError(f"{path.name} row {row}: " + broken("values", f"be {len(head)} as columns", len(values)))
    return {ours: _values(ours, [values[place] for values in rows], path.name) for ours, place in places.items()}


def _values(column: str, texts: Sequence[str], where: str) -> list[str]:
    values = [text.strip() for text in texts]
    if "" in values:
        row = values.index("")
        raise DataError(f"{where} row {row}: " + broken(column, "not be empty", ""))
    return values


def _separator(text: str) -> str:
    """The separator that the first line has most of."""
    return max(SEPARATORS, key=text.partition("\n")[0].count)


def _inside(paths: Sequence[str], slices: Sequence[str] | None, root: Path, where: str) -> list[str]:
    """The paths relative to the folder: each of an existing file inside it, and each once, or once with a slice."""
    seen: dict[tuple[str, str], int] = {}
    for row, text in enumerate(paths):
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or "\0" in text:
            rule = "be inside the folder of the CSV file, and relative to it"
            raise DataError(f"{where} row {row}: " + broken("path", rule, text))
        key = str(path), "" if slices is None else slices[row]
        if key in seen:
            raise DataError(f"{where} row {row}: " + broken("path", f"be listed once (row {seen[key]})", text))
        if not (root / path).is_file():
            raise DataError(f"{where} row {row}: " + broken("path", f"be a file in {str(root)!r}", text))
        seen[key] = row
    return [path for path, _ in seen]


def names_in_order(values: Sequence[str]) -> tuple[str, ...]:
    """The names there are: in alphabetical order, or in that of numbers."""
    names = sorted(set(values))
    return tuple(sorted(names, key=int) if all(name.isdecimal() and len(name) < 19 for name in names) else names)


def rank_numbers(values: Sequence[str], where: str) -> np.ndarray:
    return _whole(values, "rank", where)


def _whole(values: Sequence[str], column: str, where: str) -> np.ndarray:
    for row, value in enumerate(values):
        if not (value.isascii() and value.isdecimal() and len(value) < 19):
            raise DataError(f"{where} row {row}: " + broken(column, "be a whole number of at least 0", value))
    return np.array([int(value) for value in values], dtype=np.int64)
