"""Images in folders: `class/image` or `domain/class/image`, both optionally inside `train`, `test`, `val` folders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from fedprompt.data.cache import fingerprint
from fedprompt.data.sources.base import MEDICAL, NO_DOMAINS, SPLITS, Source, decode
from fedprompt.data.sources.patients import groups_of_patients
from fedprompt.errors import DataError, broken

DEEPEST = 4  # depth of folders below the root: one more than any layout has, so that circular links end
PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}

EXTENSIONS = (*sorted(PICTURES), *MEDICAL)


class FolderSource(Source):
    """Class and domain names are folder names in alphabetical order; an empty class folder still names a class."""

    def __init__(self, root: Path, domains: bool, cache: Path) -> None:
        if not root.is_dir():
            raise DataError(broken("data.source", "be a folder for this format", str(root)))
        split_level = _top_is_splits(root)
        depth = 1 + domains + split_level
        layout = "/".join(["split"] * split_level + ["domain"] * domains + ["class", "image"])
        files, folders = _scan(root)
        for file in files:
            if file.count("/") != depth:
                raise DataError(broken("data.source", f"hold images as {layout} only", str(root / file)))
        if not files:
            raise DataError(broken("data.source", f"hold images as {layout}", f"{root} (no image found)"))
        parts = [file.split("/") for file in files]
        leaves = [folder.split("/") for folder in folders if folder.count("/") == depth - 1]
        self.name = root.resolve().name
        self._root, self._files = root, files
        self.class_names = tuple(sorted({leaf[-1] for leaf in leaves}))
        self.labels = _positions([part[-2] for part in parts], self.class_names)
        self.domain_names = tuple(sorted({leaf[-2] for leaf in leaves})) if domains else NO_DOMAINS
        self.domains = (
            _positions([part[-3] for part in parts], self.domain_names)
            if domains
            else np.zeros(len(files), dtype=np.int64)
        )
        self.splits = np.array([SPLITS[part[0]] for part in parts], dtype="<U5") if split_level else None
        self.groups = groups_of_patients(root, files)
        self.fingerprint = fingerprint.of_tree(root, files, cache)

    def image(self, index: int) -> Image.Image:
        path = self._root / self._files[index]
        return decode(path, str(path))


def has_domains(root: Path) -> bool:
    """Whether images lie one level deeper than `class/image`."""
    files, _ = _scan(root)
    depth = min((file.count("/") for file in files), default=1)
    return depth - _top_is_splits(root) >= 2


def _top_is_splits(root: Path) -> bool:
    tops = [entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return "train" in tops and all(top in SPLITS for top in tops)


def _scan(root: Path) -> tuple[list[str], list[str]]:
    """Relative paths of images and of folders, sorted, with forward slashes; hidden entries are left out."""
    files, folders = [], []
    for folder, inner, names in os.walk(root, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith(".")]
        base = Path(folder).relative_to(root)
        _check_text(folder, inner + names)
        if len(base.parts) == DEEPEST:
            inner.clear()
        folders += [(base / name).as_posix() for name in inner]
        files += [
            (base / name).as_posix() for name in names if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
        ]
    return sorted(files), sorted(folders)


def _check_text(folder: str, names: list[str]) -> None:
    """Names become class names, fingerprints and messages: they must be text."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            rule = "hold file names that are text in UTF-8"
            raise DataError(broken("data.source", rule, os.path.join(folder, name))) from error


def _positions(values: list[str], names: tuple[str, ...]) -> np.ndarray:
    position = {name: index for index, name in enumerate(names)}
    return np.array([position[value] for value in values], dtype=np.int64)
