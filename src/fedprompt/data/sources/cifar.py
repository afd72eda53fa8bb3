"""CIFAR-10 and CIFAR-100 in their binary form, memory-mapped. The pickled form can run code: it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from fedprompt.data.cache import fingerprint
from fedprompt.data.sources.base import NO_DOMAINS, Source
from fedprompt.errors import DataError, broken
from fedprompt.io.bounded_read import SMALL, read_text

Kind = Literal["cifar10", "cifar100"]
KINDS: tuple[Kind, ...] = ("cifar10", "cifar100")
PIXELS = 3 * 32 * 32
LABEL_BYTES: dict[str, int] = {"cifar10": 1, "cifar100": 2}  # cifar100 has the coarse label before the fine one
FILES = {
    "cifar10": (*((f"data_batch_{batch}.bin", "train") for batch in range(1, 6)), ("test_batch.bin", "test")),
    "cifar100": (("train.bin", "train"), ("test.bin", "test")),
}
NAMES = {"cifar10": "batches.meta.txt", "cifar100": "fine_label_names.txt"}
PICKLED = (("data_batch_1", "test_batch"), ("train", "meta"))
INNER_FOLDERS = ("", "cifar-10-batches-bin", "cifar-100-binary", "cifar-10-batches-py", "cifar-100-python")


class CifarSource(Source):
    """Missing files are left out (a single batch is a usable small set), but there must be training images."""

    def __init__(self, path: Path, kind: Kind, cache: Path) -> None:
        detect_cifar(path)  # refuses the pickled form
        root = next((path / inner for inner in INNER_FOLDERS if _holds(path / inner, kind)), None)
        if root is None:
            expected = [name for name, _ in FILES[kind]]
            raise DataError(broken("data.source", f"hold at least one of {expected} for format {kind}", str(path)))
        present = [(name, split) for name, split in FILES[kind] if (root / name).is_file()]
        self.name = kind
        self.class_names = _class_names(root / NAMES[kind])
        self.domain_names = NO_DOMAINS
        self._records = [_records(root / name, LABEL_BYTES[kind]) for name, _ in present]
        self._skip = LABEL_BYTES[kind]
        self.labels = np.concatenate([records[:, self._skip - 1] for records in self._records]).astype(np.int64)
        self.domains = np.zeros(len(self.labels), dtype=np.int64)
        sizes = [len(records) for records in self._records]
        self.splits = np.repeat([split for _, split in present], sizes).astype("<U5")
        self._first_rows = np.concatenate([[0], np.cumsum(sizes)])
        for row in np.flatnonzero(self.labels >= len(self.class_names))[:1]:
            rule = f"be in 0..{len(self.class_names) - 1}"
            raise DataError(f"{self._place(row)}: " + broken("label", rule, int(self.labels[row])))
        self.fingerprint = fingerprint.of_tree(root, [name for name, _ in present], cache)

    def image(self, index: int) -> Image.Image:
        file = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        record = self._records[file][index - self._first_rows[file]]
        return Image.fromarray(np.ascontiguousarray(record[self._skip :].reshape(3, 32, 32).transpose(1, 2, 0)))

    def _place(self, index: int) -> str:
        return f"{self.name} record {index}"


def detect_cifar(path: Path) -> Kind | None:
    """Which CIFAR a folder holds, if any; only pickles in it is an error with advice."""
    for inner in INNER_FOLDERS:
        for kind in KINDS:
            if _holds(path / inner, kind):
                return kind
    for inner in INNER_FOLDERS:
        for pickled in PICKLED:
            if all((path / inner / name).is_file() for name in pickled):
                advice = "be the binary version (cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, unpacked)"
                raise DataError(
                    broken("data.source", advice, str(path / inner))
                    + f": {pickled[0]!r} is a Python pickle, which can run any code when opened, so it is never read"
                )
    return None


def _holds(folder: Path, kind: str) -> bool:
    return any((folder / name).is_file() for name, _ in FILES[kind])


def _records(path: Path, label_bytes: int) -> np.ndarray:
    size, record = path.stat().st_size, label_bytes + PIXELS
    if size == 0 or size % record:
        raise DataError(broken(f"size of {path.name}", f"be a multiple of {record} bytes (is it cut off?)", size))
    return np.memmap(path, dtype=np.uint8, mode="r", shape=(size // record, record))


def _class_names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in read_text(path, SMALL).splitlines() if line.strip())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data.source: class names are missing: cannot read {str(path)!r}: {reason}") from error
