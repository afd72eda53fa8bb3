"""Pictures that somebody wants to know about: files, folders of them, and rows of parquet files, one after the other.

Nothing here stops at the first bad picture: what cannot be read is told when it is its turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image

from fedprompt.data.base import SPLITS, decode
from fedprompt.data.folders import EXTENSIONS
from fedprompt.data.parquet import ParquetSource
from fedprompt.errors import DataError, broken


@dataclass(frozen=True)
class Item:
    """One picture that was asked about."""

    name: str  #: of the file, or of the file and its row
    load: Callable[[], Image.Image]  #: a DataError where that is not possible
    label: str | None = None  #: the name of its class, where a folder or a column tells


def items(paths: Iterable[Path], class_names: Iterable[str], cache: Path, split: str | None = None) -> Iterator[Item]:
    """What paths stand for, in their order: a folder for all images below it, a parquet file for its rows.

    In a folder, an image is labelled where the folder it lies in has the name of a class. With `split`, only the rows of
    parquet files that belong to it.
    """
    classes = frozenset(class_names)
    for path in paths:
        if path.is_dir():
            yield from _of_folder(path, classes)
        elif path.suffix == ".parquet" and path.is_file():
            yield from _of_parquet(path, cache, split)
        else:
            yield Item(shown(path), partial(_read, path))


def _of_folder(root: Path, classes: frozenset[str]) -> Iterator[Item]:
    """Folder by folder, sorted; hidden entries are left out, and links to folders are not followed."""
    found = False
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        label = Path(folder).name if Path(folder) != root and Path(folder).name in classes else None
        for name in sorted(names):
            if Path(name).suffix.lower() in EXTENSIONS and not name.startswith("."):
                found = True
                path = Path(folder) / name
                yield Item(shown(path), partial(_read, path), label)
    if not found:
        yield _failed(root, DataError(broken("folder", "hold images", str(root))))


def _of_parquet(path: Path, cache: Path, split: str | None) -> Iterator[Item]:
    try:
        source = ParquetSource(path, cache, required=("image",) if split is None else ("image", "split"))
    except DataError as error:
        yield _failed(path, error)
        return
    for row, label in enumerate(source.labels.tolist()):
        if split is not None and source.splits is not None and source.splits[row] != SPLITS[split]:
            continue
        known = source.class_names[label] if label >= 0 else None
        yield Item(f"{shown(path)}:{row}", partial(source.image, row), known)


def _read(path: Path) -> Image.Image:
    """An image file. A pipe of that name would wait for ever, so it has to be a file."""
    if not path.is_file():
        raise DataError(broken("image", "be an existing file", shown(path)))
    return decode(path, shown(path))


def _failed(path: Path, error: DataError) -> Item:
    def load() -> Image.Image:
        raise error

    return Item(shown(path), load)


def shown(path: Path) -> str:
    """A path as text that can be written anywhere: bytes that are no text are told by their numbers."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
