"""From images to arrays: a store of resized pixels, and normalisation to tensors."""

from __future__ import annotations

import hashlib
import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image

from fedprompt.data.base import Source
from fedprompt.errors import ConfigError, broken

if TYPE_CHECKING:
    import torch

RECIPE = 1  # raise it when `resized` gives other pixels, so that old files are left alone


class ImageStore:
    """Decoded, resized pixels, kept in a memory-mapped file from run to run and filled image by image.

    Beside the pixels lies one checksum per image, written after them. An entry counts only when its pixels match its
    checksum, so a write cut short by a kill, a power cut or a full disk is never read as an image: it is decoded again.
    Two processes that fill the same entry write the same bytes. Pixels are written with `pwrite`, not through the map:
    on a full disk that is an error we can handle, where the map would kill the process. For the same reason an entry is
    looked at through the map only after it was found good: a page that was never written may need room to be read. When
    the cache cannot be written, pixels stay in memory.
    """

    def __init__(self, source: Source, size: int, resize: str, cache: Path) -> None:
        if resize not in ("squash", "crop"):
            raise ConfigError(broken("data.resize", "be 'squash' or 'crop'", resize))
        self._source, self._size, self._resize = source, size, resize
        self._shape = (size, size, 3)
        self._bytes = size * size * 3
        self._good = np.zeros(len(source), dtype=bool)  # checked by this process
        self._memory: dict[int, np.ndarray] = {}  # what could not be written
        self._pixels: np.ndarray | None = None
        self._file = self._sums_file = -1
        key = f"{RECIPE}|{PIL.__version__}|{source.fingerprint}|{len(source)}|{size}|{resize}"
        self.path = cache / "pixels" / f"{size}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.rgb"
        try:
            self._open()
            self._writable = True
        except OSError as error:
            self._stop_writing(error)

    def pixels(self, indices: np.ndarray) -> np.ndarray:
        """The pixels of some images, (len(indices), size, size, 3) uint8."""
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self._source)):
            raise IndexError(
                broken("indices", f"be in 0..{len(self._source) - 1}", [int(indices.min()), int(indices.max())])
            )
        for index in np.unique(indices[~self._good[indices]]):  # sorted, so that neighbours on disk are read together
            self._fill(int(index))
        if self._pixels is not None and not self._memory:
            return np.asarray(self._pixels[indices])
        result = np.empty((len(indices), *self._shape), dtype=np.uint8)
        for row, index in enumerate(indices.tolist()):
            kept = self._memory.get(index)
            result[row] = kept if kept is not None else self._pixels[index]  # type: ignore[index]
        return result

    def _open(self) -> None:
        count = len(self._source)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._sums_file = os.open(self.path.with_suffix(".crc"), os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, count * self._bytes)  # sparse: no space is taken before it is filled
        os.ftruncate(self._sums_file, count * 4)
        self._pixels = np.memmap(self.path, dtype=np.uint8, mode="r", shape=(count, *self._shape))

    def _fill(self, index: int) -> None:
        if self._pixels is not None and self._is_kept(index):
            self._good[index] = True
            return
        pixels = resized(self._source.image(index), self._size, self._resize)
        if self._writable:
            try:
                content = pixels.tobytes()
                _write(self._file, content, index * self._bytes)
                _write(self._sums_file, _checksum(content).to_bytes(4, "little"), index * 4)
            except OSError as error:
                self._stop_writing(error)
        if not self._writable:
            self._memory[index] = pixels
        self._good[index] = True

    def _is_kept(self, index: int) -> bool:
        known = int.from_bytes(os.pread(self._sums_file, 4, index * 4), "little")
        return bool(known) and known == _checksum(os.pread(self._file, self._bytes, index * self._bytes))

    def _stop_writing(self, error: OSError) -> None:
        self._writable = False
        warnings.warn(f"decoded images stay in memory: {self.path} cannot be written: {error}", stacklevel=4)

    def __del__(self) -> None:
        for handle in (getattr(self, "_file", -1), getattr(self, "_sums_file", -1)):
            if handle >= 0:
                os.close(handle)


def resized(image: Image.Image, size: int, resize: str) -> np.ndarray:
    """A square of uint8: `squash` ignores the aspect ratio; `crop` scales the shorter side and takes the centre."""
    width, height = image.size
    box = None
    if resize == "crop":
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def normalise(
    pixels: np.ndarray, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Pixels (B, S, S, 3) uint8 as (B, 3, S, S) floats with the backbone's mean and deviation."""
    import torch

    exact = torch.float64 if dtype == torch.float64 else torch.float32  # round to a short type once, at the end
    images = torch.from_numpy(np.ascontiguousarray(pixels)).to(device).permute(0, 3, 1, 2).to(exact) / 255
    centre = torch.tensor(list(mean), dtype=exact, device=device).view(1, 3, 1, 1)
    spread = torch.tensor(list(std), dtype=exact, device=device).view(1, 3, 1, 1)
    return ((images - centre) / spread).to(dtype).contiguous()


def _checksum(pixels: bytes) -> int:
    return zlib.crc32(pixels) or 1  # 0 means empty


def _write(handle: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(handle, content, offset)
        content, offset = content[written:], offset + written
