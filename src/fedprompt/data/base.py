"""What every set of images offers, and the one way an image is decoded."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fedprompt.errors import DataError, broken

NO_DOMAINS = ("all",)
SPLITS = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}


class Source(ABC):
    """Labelled images in a fixed order. Labels and domains are in memory; pixels are decoded when asked for."""

    name: str
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    labels: np.ndarray  # (n,) int64
    domains: np.ndarray  # (n,) int64, zeros when the set has no domains
    splits: np.ndarray | None  # (n,) of "train", "test", "val"; None when the set has no split
    ranks: np.ndarray | None = None  # (n,) order inside (split, domain, class): `rank < k` is a cut of k per cell
    fingerprint: str  # sha256 of the content

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """The image in RGB; a damaged one is a DataError that names its file or row."""


def decode(encoded: bytes | Path, where: str) -> Image.Image:
    """Read a whole image now: Pillow is lazy, and damage must be found here, where its place is known."""
    try:
        with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
            image.load()
            return to_rgb(image)
    except Exception as error:  # Pillow's readers raise anything from OSError to struct.error on damaged bytes
        raise DataError(f"image must be readable: {where}: {str(error) or type(error).__name__}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Three channels of eight bits. Sixteen-bit grey is scaled: Pillow would clip it to white."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.uint32) // 257).astype(np.uint8))
    return image.convert("RGB")


def encode_names(
    values: Sequence[object], names: tuple[str, ...] | None, field: str, where: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Turn a column of integers or of names into indices and names; every complaint names the row."""
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise DataError(f"{where} row {row}: " + broken(field, "be an integer or a name", value))
        if type(value) is not type(values[0]):
            raise DataError(f"{where} row {row}: " + broken(field, "be all integers or all names", value))
    if values and isinstance(values[0], str):
        names = names if names is not None else tuple(sorted({str(value) for value in values}))
        position: dict[object, int] = {name: index for index, name in enumerate(names)}
        for row, value in enumerate(values):
            if value not in position:
                raise DataError(f"{where} row {row}: " + broken(field, f"be one of {list(names)}", value))
        return np.array([position[value] for value in values], dtype=np.int64), names
    indices = np.array(values, dtype=np.int64)
    names = names if names is not None else tuple(str(index) for index in range(int(indices.max(initial=-1)) + 1))
    for row in np.flatnonzero((indices < 0) | (indices >= len(names)))[:1]:
        raise DataError(f"{where} row {row}: " + broken(field, f"be in 0..{len(names) - 1}", int(indices[row])))
    return indices, names


def encode_splits(values: Sequence[object], where: str) -> np.ndarray:
    """The split of every image; all spellings of validation become "val"."""
    for row, value in enumerate(values):
        if value not in SPLITS:
            raise DataError(f"{where} row {row}: " + broken("split", f"be one of {sorted(SPLITS)}", value))
    return np.array([SPLITS[str(value)] for value in values], dtype="<U5")
