"""Many lists of image numbers as two arrays, and as few bytes."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from fedprompt.errors import DataError, broken

MOST_BYTES = 2**27  # of lists in a run file before they are compressed: some fifteen million images


class IndexLists(Sequence[np.ndarray]):
    """Lists end to end: list k is `values[offsets[k] : offsets[k + 1]]`. There is no object per list."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        self.values, self.offsets = values, offsets

    @classmethod
    def of(cls, lists: Iterable[np.ndarray]) -> IndexLists:
        parts = [np.asarray(part, dtype=np.int64) for part in lists]
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        return cls.of_sizes(np.concatenate([sizes[:0], *parts]), sizes)

    @classmethod
    def of_sizes(cls, values: np.ndarray, sizes: np.ndarray) -> IndexLists:
        """Values cut into lists of these sizes."""
        return cls(values, np.concatenate([[0], np.cumsum(sizes)]))

    @classmethod
    def joined(cls, parts: Sequence[IndexLists]) -> IndexLists:
        """The lists of all parts, one part after the other."""
        sizes = np.concatenate([part.sizes for part in parts])
        return cls.of_sizes(np.concatenate([part.values for part in parts]), sizes)

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """Which list each value is in."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, place: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[np.ndarray, ...]: ...
    def __getitem__(self, place: int | slice) -> np.ndarray | tuple[np.ndarray, ...]:
        places = range(len(self))[place]
        if isinstance(places, range):
            return tuple(self[each] for each in places)
        return self.values[self.offsets[places] : self.offsets[places + 1]]

    def packed(self) -> str:
        """As text: sizes and differences of neighbours, byte by byte of equal weight, compressed."""
        most = MOST_BYTES // 8 - 1
        if len(self) + len(self.values) > most:
            rule = f"have at most {most} clients and images together to be kept in a run file"
            raise DataError(broken("a partition", rule, len(self) + len(self.values)))
        numbers = np.concatenate([[len(self)], self.sizes, np.diff(self.values, prepend=0)]).astype("<i8")
        folded = (numbers << 1) ^ (numbers >> 63)  # small negative differences become small numbers
        planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, 8).T)
        return base64.b64encode(zlib.compress(planes.tobytes(), 1)).decode("ascii")

    @classmethod
    def unpacked(cls, text: str) -> IndexLists:
        """The lists that were `packed`; a ValueError for any other text."""
        planes = _inflated(text)
        if not planes or len(planes) % 8:
            raise ValueError("must hold whole numbers of eight bytes")
        folded = np.ascontiguousarray(np.frombuffer(planes, dtype=np.uint8).reshape(8, -1).T).view("<u8").ravel()
        numbers = (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
        count = int(numbers[0])
        if not 0 <= count < len(numbers):
            raise ValueError(f"must hold the sizes of {count} lists")
        sizes, values = numbers[1 : 1 + count], np.cumsum(numbers[1 + count :])
        if (sizes < 0).any() or (sizes > len(values)).any() or sizes.sum() != len(values):
            raise ValueError(f"must hold as many numbers as the sizes say, got {len(values)}")
        return cls.of_sizes(values, sizes)


def _inflated(text: str) -> bytes:
    """Decompress at most MOST_BYTES."""
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"must be compressed text: {error}") from error
    if not reader.eof:
        raise ValueError(f"must be complete and have at most {MOST_BYTES} bytes")
    return content
