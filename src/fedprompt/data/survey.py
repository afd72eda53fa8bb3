"""A first look at a set of images: classes, domains, counts, sizes, broken files, and class names that are codes."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources.base import NO_DOMAINS, Source
from fedprompt.data.sources.image_folder import EXTENSIONS
from fedprompt.errors import DataError

LONGEST_LOOK = 20.0  # seconds for decoding images, in a random order
CODE = re.compile(r"n\d{8}|\d+|(class|label|category|cls|c|id)[ _-]?\d+|[0-9a-f]{12,}", re.IGNORECASE)
UNREAD = {
    ".heic",
    ".heif",
    ".avif",
    ".svg",
    ".raw",
    ".dng",
    ".cr2",
    ".nef",
    ".jp2",
    ".psd",
}  # pictures that are not understood
MOST_ENTRIES = 200_000  # of a folder that are looked at for such pictures


@dataclass(frozen=True)
class Survey:
    """What was found."""

    images: int
    classes: dict[str, int]
    """Images by class."""
    domains: dict[str, int]
    """Images by domain; empty without domains."""
    splits: dict[str, int]
    """Images by split; empty without a split."""
    examined: int
    """Images that were decoded."""
    median_size: tuple[int, int]
    """Width and height; zeros where no image could be read."""
    smallest_side: int
    largest_side: int
    broken: list[str]
    """One sentence for each image that cannot be read."""
    codes: list[str]
    """Class names that are no words."""
    unread: dict[str, int]
    """Files by the ending of a format that is not understood."""


def survey(source: Source, path: Path | None = None) -> Survey:
    """Look at a source. `path` is the folder it is in: files of other formats are counted there."""
    sizes, broken, examined = _examine(source)
    sides = [side for size in sizes for side in size]
    return Survey(
        images=len(source),
        classes=_counts(source.labels, source.class_names),
        domains={} if source.domain_names == NO_DOMAINS else _counts(source.domains, source.domain_names),
        splits={} if source.splits is None else dict(Counter(source.splits.tolist())),
        examined=examined,
        median_size=(int(np.median([w for w, _ in sizes])), int(np.median([h for _, h in sizes]))) if sizes else (0, 0),
        smallest_side=min(sides, default=0),
        largest_side=max(sides, default=0),
        broken=broken,
        codes=[name for name in source.class_names if CODE.fullmatch(name)],
        unread={} if path is None or not path.is_dir() else _unread(path),
    )


def _examine(source: Source) -> tuple[list[tuple[int, int]], list[str], int]:
    """Sizes of images, those that are broken, and how many were decoded: all, as long as there is time."""
    sizes, broken, examined = [], {}, 0
    end = time.monotonic() + LONGEST_LOOK
    for index in stream(0, "survey").permutation(len(source)).tolist():
        if time.monotonic() > end:
            break
        examined += 1
        try:
            sizes.append(source.image(index).size)
        except DataError as error:
            broken[index] = str(error).removeprefix("image must be readable: ")
    return sizes, [broken[index] for index in sorted(broken)], examined


def _counts(numbers: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    return dict(zip(names, np.bincount(numbers, minlength=len(names)).tolist(), strict=True))


def _unread(root: Path) -> dict[str, int]:
    found: Counter[str] = Counter()
    for number, path in enumerate(root.rglob("*")):
        if number == MOST_ENTRIES:
            break
        if path.suffix.lower() in UNREAD.difference(EXTENSIONS):
            found[path.suffix.lower()] += 1
    return dict(found)
