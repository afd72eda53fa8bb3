"""From images to arrays: a store of resized pixels, and normalisation to tensors."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image

from fedprompt.data.cache.prefetch import Turns
from fedprompt.data.cache.row_file import RowFile
from fedprompt.data.sources.base import Source
from fedprompt.errors import ConfigError, broken

if TYPE_CHECKING:
    import torch

RECIPE = 1  # raise it when `resized` gives other pixels, so that old files are left alone
GROUP = 16  # images that are decoded before they are written


class ImageStore:
    """Decoded, resized pixels, kept in a file of the cache from run to run and filled image by image.

    What cannot be written stays in memory. Images may be decoded ahead by a thread in the background; a reader that needs one that
    is under way waits for it. Only one image is read from the source at a time: sources may share file handles.
    """

    def __init__(self, source: Source, size: int, resize: str, cache: Path) -> None:
        if resize not in ("squash", "crop"):
            raise ConfigError(broken("data.resize", "be 'squash' or 'crop'", resize))
        self._source, self._size, self._resize = source, size, resize
        self._shape = (size, size, 3)
        self._memory: dict[int, np.ndarray] = {}  # what could not be written
        self._turns = Turns()
        key = f"{RECIPE}|{PIL.__version__}|{source.fingerprint}|{len(source)}|{size}|{resize}"
        self.cache, self.key = cache, f"{size}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        self._file = RowFile(cache / "pixels" / f"{self.key}.rgb", len(source), size * size * 3)
        if self._file.problem is not None:
            self._warn(self._file.problem)

    @property
    def path(self) -> Path:
        return self._file.path

    def pixels(self, indices: np.ndarray) -> np.ndarray:
        """The pixels of some images, (len(indices), size, size, 3) uint8."""
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self._source)):
            raise IndexError(
                broken("indices", f"be in 0..{len(self._source) - 1}", [int(indices.min()), int(indices.max())])
            )
        if not self.known(indices).all():
            self._fill(indices)
        if not self._memory:
            return self._file.read(indices).reshape(-1, *self._shape)
        result = np.empty((len(indices), *self._shape), dtype=np.uint8)
        filed = self._file.known(indices)
        result[filed] = self._file.read(indices[filed]).reshape(-1, *self._shape)
        for place in np.flatnonzero(~filed).tolist():
            result[place] = self._memory[int(indices[place])]
        return result

    def known(self, indices: np.ndarray) -> np.ndarray:
        """Which images are at hand, as far as is known without opening the file."""
        known = self._file.known(indices)
        return known | np.isin(indices, list(self._memory)) if self._memory else known

    def decode_ahead(self, indices: np.ndarray) -> None:
        """Decode what is absent of these images, for those who will ask; damaged ones are left to them."""
        for group in np.array_split(indices, max(1, -(-len(indices) // GROUP))):
            with self._turns.turn(ahead=True):
                self._keep(self._absent(group), lenient=True)

    def _fill(self, indices: np.ndarray) -> None:
        with self._turns.turn():
            absent = self._absent(indices)  # in order, so that neighbours on disk are read together
            for start in range(0, len(absent), GROUP):
                self._keep(absent[start : start + GROUP])

    def _absent(self, indices: np.ndarray) -> np.ndarray:
        indices = np.unique(indices[~self.known(indices)])
        return indices[~self._file.holds(indices)]

    def _keep(self, indices: np.ndarray, lenient: bool = False) -> None:
        """Decode some images, in rising order, and keep them."""
        decoded: dict[int, np.ndarray] = {}
        for index in indices.tolist():
            try:
                decoded[index] = resized(self._source.image(index), self._size, self._resize)
            except Exception:
                if not lenient:
                    raise
        if not decoded:
            return
        could_write = self._file.problem is None
        if not self._file.write(np.array(list(decoded)), np.stack(list(decoded.values()))):
            self._memory.update(decoded)
            if could_write and self._file.problem is not None:
                self._warn(self._file.problem)

    def _warn(self, problem: OSError) -> None:
        warnings.warn(f"decoded images stay in memory: {self.path} cannot be written: {problem}", stacklevel=5)


def resized(image: Image.Image, size: int, resize: str) -> np.ndarray:
    """A square of uint8: `squash` ignores the aspect ratio; `crop` scales the shorter side and takes the centre."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=seen_part(image, resize))
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def seen_part(image: Image.Image, resize: str) -> tuple[float, float, float, float]:
    """What of an image becomes the square: left, top, right and bottom in its pixels."""
    width, height = image.size
    if resize != "crop":
        return 0, 0, width, height
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


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
