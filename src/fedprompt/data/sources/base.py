"""The interface of every set of images, and the decoding of an image."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedprompt.errors import DataError, broken

NO_DOMAINS = ("all",)
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")  # readers that image bytes may choose from
MOST_PIXELS = 64 * 2**20  # of one image: more than today's cameras give, and 256 MB when decoded
LONGEST_SIDE = 65_535  # resizing allocates by the longer side, so a thin strip is not harmless
MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L"}
MEDICAL = (".dcm", ".dicom", ".nii", ".nii.gz")  # read by dicom.py and nifti.py
TILE_WIDTH, TILE_HEIGHT = 322, 323  # TIFF tags
MOST_NAMES = 100_000  # classes or domains
SPLITS = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}


class Source(ABC):
    """Labelled images in a fixed order. Labels and domains are in memory; pixels are decoded on demand. A source may hold
    sentences instead.
    """

    holds: Literal["images", "sentences"] = "images"
    name: str
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    labels: np.ndarray  # (n,) int64
    domains: np.ndarray  # (n,) int64, zeros when the set has no domains
    splits: np.ndarray | None  # (n,) of "train", "test", "val"; None when the set has no split
    ranks: np.ndarray | None = None  # (n,) order inside (split, domain, class): `rank < k` is a cut of k per cell
    groups: np.ndarray | None = None  # (n,) images that belong together, such as those of one patient
    fingerprint: str  # sha256 of the content

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """The image in RGB; a damaged one is a DataError that names its file or row."""

    def sentence(self, index: int) -> str:
        """The text, where the source holds sentences."""
        raise DataError(broken(f"{self.name} row {index}", "be a sentence", "an image"))


def decode(encoded: bytes | Path, where: str, slice: int | None = None) -> Image.Image:
    """Read a whole image now: Pillow is lazy, and damage must be found here, where file or row is known.

    The header is checked before memory for the pixels is allocated. `slice` is that of a volume.
    """
    if isinstance(encoded, Path) and encoded.name.lower().endswith(MEDICAL):
        return _medical(encoded, where, slice)
    try:
        stream = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
        with Image.open(stream, formats=FORMATS) as image:
            _check_announced(image)
            image.load()
            return to_rgb(image)
    except UnidentifiedImageError as error:
        raise DataError(f"image must be readable: {where}: it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's readers raise anything from OSError to struct.error on damaged bytes
        raise DataError(f"image must be readable: {where}: {str(error) or type(error).__name__}") from error


def _medical(path: Path, where: str, slice: int | None) -> Image.Image:
    from fedprompt.data.sources import dicom, nifti

    try:
        if nifti.is_nifti(path):
            return nifti.decode_slice(path, slice, MOST_PIXELS, LONGEST_SIDE)
        return dicom.decode_dicom(path, MOST_PIXELS, LONGEST_SIDE)
    except (ValueError, OSError) as error:
        raise DataError(f"image must be readable: {where}: {str(error) or type(error).__name__}") from None


def _check_announced(image: Image.Image) -> None:
    width, height = image.size
    if not (min(width, height) >= 1 and max(width, height) <= LONGEST_SIDE and width * height <= MOST_PIXELS):
        rule = f"have sides of 1 to {LONGEST_SIDE} and at most {MOST_PIXELS} pixels"
        raise ValueError(broken("size", rule, image.size))
    if image.mode not in MODES and (image.format, image.mode) != ("PPM", "I"):
        raise ValueError(broken("mode", "be colour or grey of at most 16 bits", image.mode))
    if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO: a photograph and its smaller copies
        raise ValueError("must be one picture, got several frames")
    tags = getattr(image, "tag_v2", {})  # of TIFF, whose tiles are allocated whole however small the image is
    if int(tags.get(TILE_WIDTH, 1)) * int(tags.get(TILE_HEIGHT, 1)) > MOST_PIXELS:
        raise ValueError(broken("tiles", f"have at most {MOST_PIXELS} pixels", (tags[TILE_WIDTH], tags[TILE_HEIGHT])))


def to_rgb(image: Image.Image) -> Image.Image:
    """Three channels of eight bits. Sixteen-bit grey is scaled: Pillow would clip it to white."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.uint32) // 257).astype(np.uint8))
    return image.convert("RGB")


def encode_names(
    values: Sequence[object], names: tuple[str, ...] | None, field: str, where: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Turn a column of integers or of names into indices and names; every error names the row."""
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
    numbers = [value for value in values if isinstance(value, int)]
    count = len(names) if names is not None else min(max(numbers, default=-1) + 1, MOST_NAMES)
    for row, number in enumerate(numbers):
        if not 0 <= number < count:
            raise DataError(f"{where} row {row}: " + broken(field, f"be in 0..{count - 1}", number))
    return np.array(numbers, dtype=np.int64), names if names is not None else tuple(map(str, range(count)))


def encode_splits(values: Sequence[object], where: str) -> np.ndarray:
    """The split of every image; all spellings of validation become "val"."""
    for row, value in enumerate(values):
        if not isinstance(value, str) or value not in SPLITS:
            raise DataError(f"{where} row {row}: " + broken("split", f"be one of {sorted(SPLITS)}", value))
    return np.array([SPLITS[str(value)] for value in values], dtype="<U5")
