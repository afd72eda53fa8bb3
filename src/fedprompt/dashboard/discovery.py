"""Finds the runs below some folders. Nothing outside them is opened: links are not followed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedprompt.io.safe_text import safe_line
from fedprompt.runs.tables import FILE

DEPTH = 5  # folders inside folders
MOST_FOLDERS = 20_000  # that are searched
MOST_RUNS = 5_000  # that are shown


@dataclass(frozen=True)
class Found:
    """A run folder, and its name on the page."""

    id: str
    """Stays the same between servers, so that a view can be bookmarked."""
    path: Path
    name: str
    folder: str
    """Its folder, as the user wrote it."""


def discover(folders: Sequence[Path]) -> tuple[dict[str, Found], bool]:
    """Runs by id, and whether the search stopped at its limit."""
    found: dict[str, Found] = {}
    looked = 0
    for given in folders:
        root = given.parent if given.name == FILE else given
        for path in _walk(root):
            looked += 1
            if looked > MOST_FOLDERS or len(found) >= MOST_RUNS:
                return found, True
            if _is_plain(path / FILE):
                run = _found(root, path)
                found.setdefault(run.id, run)
    return found, False


def _walk(root: Path) -> Iterator[Path]:
    """A folder and those below it; the inside of a run is not searched. A folder that disappears meanwhile counts as empty."""
    waiting = [(root, 0)]
    while waiting:
        path, depth = waiting.pop()
        yield path
        if depth == DEPTH or _is_plain(path / FILE):
            continue
        try:
            with os.scandir(path) as entries:
                inside = sorted(
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                )
        except OSError:
            continue
        waiting += [(path / name, depth + 1) for name in reversed(inside)]


def _is_plain(path: Path) -> bool:
    try:
        return path.is_file() and not path.is_symlink()
    except OSError:
        return False


def id_of(path: Path) -> str:
    """The id of a run folder."""
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]


def _found(root: Path, path: Path) -> Found:
    whole = os.path.realpath(root / path)
    return Found(id_of(root / path), path, printable(os.path.basename(whole)), printable(str(path.parent)))


def printable(text: str) -> str:
    """A name of the file system as text that can be sent and shown: bytes that are not UTF-8 become question marks."""
    return safe_line(text.encode("utf-8", "replace").decode("utf-8"))
