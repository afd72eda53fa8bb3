"""Slices of NIfTI files (`.nii`, `.nii.gz`), one picture each, by their number along the third axis.

Only the fixed part of the header is parsed, by nibabel, and only the bytes of the slice are read: extensions, which may be of
any size and hold any text, are never looked at. Values become grey from `cal_min` to `cal_max` where the file has them,
else from the smallest to the largest value of the slice. The first axis goes to the right and the second one up.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from fedprompt.data.sources.dicom import shown
from fedprompt.errors import ConfigError, broken

SUFFIXES = (".nii", ".nii.gz")
SIZES = {348: "Nifti1Header", 540: "Nifti2Header"}
LONGEST_HEADER = 2**20  # bytes before the values
MOST_BYTES = 2**31  # of values before and in the slice: a compressed file is unpacked up to there
PIECE = 2**22

Array = np.ndarray[Any, np.dtype[Any]]


def library() -> Any:
    try:
        import nibabel
    except ModuleNotFoundError as error:
        raise ConfigError("NIfTI files need the package nibabel: pip install 'fedprompt[medical]'") from error
    return nibabel


def is_nifti(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def decode_slice(path: Path, number: int | None, most_pixels: int, longest_side: int) -> Image.Image:
    """The slice of that number; without one, the file must have a single slice."""
    nibabel = library()
    opener: Callable[..., Any] = gzip.open if path.name.lower().endswith(".gz") else open
    with opener(path, "rb") as stream:
        try:
            values = _slice(stream, _header(nibabel, stream), number, most_pixels, longest_side)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"it cannot be unpacked ({type(error).__name__})") from None
    grey = np.rint(255 * values).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(grey.T[::-1])).convert("RGB")


def _header(nibabel: Any, stream: IO[bytes]) -> Any:
    begun = stream.read(540)
    for order in ("<", ">"):
        name = SIZES.get(int(np.frombuffer(begun[:4].ljust(4, b"\0"), f"{order}i4")[0]))
        if name is not None:
            size = 348 if name == "Nifti1Header" else 540
            try:
                header = getattr(nibabel, name)(begun[:size], endianness=order, check=False)
                if bytes(header["magic"].tobytes())[:2] == b"n+":
                    return header
            except Exception as error:
                raise ValueError(f"its header cannot be read ({type(error).__name__})") from None
    raise ValueError("it is no NIfTI file in one piece")


def _slice(stream: IO[bytes], header: Any, number: int | None, most_pixels: int, longest_side: int) -> Array:
    """Values in 0..1, (width, height)."""
    try:
        shape = [int(size) for size in header.get_data_shape()]
        dtype, offset = header.get_data_dtype(), int(header["vox_offset"])
        slope, intercept = (float(header[name]) for name in ("scl_slope", "scl_inter"))
        low, high = float(header["cal_min"]), float(header["cal_max"])
    except Exception as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from None
    width, height, *rest = [*shape, 1, 1][: max(2, len(shape))] if shape else [0, 0]
    slices = rest[0] if rest else 1
    if any(size != 1 for size in rest[1:]):
        raise ValueError(broken("shape", "have at most three axes", tuple(shape)))
    if not (min(width, height) >= 1 and max(width, height) <= longest_side and width * height <= most_pixels):
        rule = f"have sides of 1 to {longest_side} and at most {most_pixels} pixels"
        raise ValueError(broken("size", rule, (width, height)))
    if dtype.kind not in "iuf":
        raise ValueError("its values must be whole or real numbers")
    if number is None and slices != 1:
        raise ValueError(f"must be one picture, got {slices} slices: list them in a CSV file with a column slice")
    chosen = number or 0
    if not 0 <= chosen < slices:
        raise ValueError(broken("slice", f"be in 0..{slices - 1}", chosen))
    size = width * height * dtype.itemsize
    start = offset + chosen * size
    if not 0 <= offset <= LONGEST_HEADER or start + size > MOST_BYTES:
        raise ValueError(f"must have its values within the first {MOST_BYTES} bytes")
    content = _bytes_at(stream, start, size)
    values = np.frombuffer(content, dtype).reshape(height, width).T.astype(np.float64)
    if slope != 0 and np.isfinite([slope, intercept]).all():
        values = values * slope + intercept
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip((values - low) / (high - low), 0, 1) if high > low else shown(values, None)


def _bytes_at(stream: IO[bytes], start: int, size: int) -> bytes:
    """Bytes at a place, without keeping those before it."""
    left = start - stream.tell()
    if left < 0 or not isinstance(stream, gzip.GzipFile):
        stream.seek(start, io.SEEK_SET)
        left = 0
    while left:
        piece = stream.read(min(left, PIECE))
        if not piece:
            raise EOFError
        left -= len(piece)
    content = stream.read(size)
    if len(content) != size:
        raise ValueError("it is cut short")
    return content
