"""Pictures to predict: files, folders of them, and rows of tables, one after the other. Rows with a text are sentences.

A bad picture does not stop the others: its error is reported in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image

from fedprompt.data.sources.base import SPLITS, Source, decode
from fedprompt.data.sources.csv_table import SUFFIXES as TABLES
from fedprompt.data.sources.csv_table import CsvSource
from fedprompt.data.sources.image_folder import EXTENSIONS
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.data.sources.sentences import csv_sentences, parquet_sentences
from fedprompt.errors import DataError, broken


@dataclass(frozen=True)
class Item:
    """One image or text to predict."""

    name: str
    """Of the file, or of the file and its row."""
    load: Callable[[], Image.Image | str]
    """a DataError if that is not possible."""
    label: str | None = None
    """The name of its class, from a folder or a column."""


def items(paths: Iterable[Path], class_names: Iterable[str], cache: Path, split: str | None = None) -> Iterator[Item]:
    """The pictures of paths, in their order: a folder gives all images below it, a parquet or CSV file its rows.

    In a folder, an image is labelled if its own folder has the name of a class. With `split`, only the rows of
    such files that belong to it.
    """
    classes = frozenset(class_names)
    for path in paths:
        if path.is_dir():
            yield from _of_folder(path, classes)
        elif path.suffix in (".parquet", *TABLES) and path.is_file():
            yield from _of_table(path, cache, split)
        else:
            yield Item(shown(path), partial(_read, path))


def _of_folder(root: Path, classes: frozenset[str]) -> Iterator[Item]:
    """Folder by folder, sorted; hidden entries are left out, and links to folders are not followed."""
    found = False
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        label = Path(folder).name if Path(folder) != root and Path(folder).name in classes else None
        for name in sorted(names):
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                found = True
                path = Path(folder) / name
                yield Item(shown(path), partial(_read, path), label)
    if not found:
        yield _failed(root, DataError(broken("folder", "hold images", str(root))))


def _of_table(path: Path, cache: Path, split: str | None) -> Iterator[Item]:
    needed = () if split is None else ("split",)
    source: Source | None
    try:
        if path.suffix in TABLES:
            source = csv_sentences(path, needed) or CsvSource(path, cache)
        else:
            source = parquet_sentences(path, needed) or ParquetSource(path, cache, required=("image", *needed))
    except DataError as error:
        yield _failed(path, error)
        return
    for row, label in enumerate(source.labels.tolist()):
        if split is not None and source.splits is not None and source.splits[row] != SPLITS[split]:
            continue
        known = source.class_names[label] if label >= 0 else None
        load: Callable[[int], Image.Image | str] = source.sentence if source.holds == "sentences" else source.image
        yield Item(f"{shown(path)}:{row}", partial(load, row), known)


def _read(path: Path) -> Image.Image:
    """An image file. It must be a regular file: a pipe would block forever."""
    if not path.is_file():
        raise DataError(broken("image", "be an existing file", shown(path)))
    return decode(path, shown(path))


def _failed(path: Path, error: DataError) -> Item:
    def load() -> Image.Image:
        raise error

    return Item(shown(path), load)


def shown(path: Path) -> str:
    """A path as printable text: bytes that are not text are written as numbers."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
