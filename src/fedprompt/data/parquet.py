"""Images as encoded bytes in one parquet file: columns `image`, `label` and, when there, `domain`, `split` and `rank`.

`image` holds bytes, or the struct {bytes, path} that the `datasets` library writes. Labels and domains are integers or
names. Names of integers come from a JSON file of the same stem (keys `classes`, `domains`) or from the file's metadata.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fedprompt.data import fingerprint
from fedprompt.data.base import NO_DOMAINS, Source, decode, encode_names, encode_splits
from fedprompt.errors import DataError, broken

KEPT_BYTES = 256 * 2**20  # of decompressed row groups; compressed pages cannot be mapped straight into memory


class ParquetSource(Source):
    """Small columns are read at once; images row group by row group, the latest groups being kept."""

    def __init__(self, path: Path, cache: Path) -> None:
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
            present = self._file.schema_arrow.names
            for column in ("image", "label"):
                if column not in present:
                    raise DataError(f"{path}: " + broken("parquet columns", f"include {column!r}", present))
            small = [column for column in ("label", "domain", "split", "rank") if column in present]
            columns = {name: values.to_pylist() for name, values in _columns(self._file, small).items()}
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"data.source must be a readable parquet file: {path}: {error}") from error
        metadata = self._file.schema_arrow.metadata or {}
        classes, domains = _declared_names(path, metadata)
        self.name = path.stem
        self._where = path.name
        self.labels, self.class_names = encode_names(columns["label"], classes, "label", self._where)
        if "domain" in columns:
            self.domains, self.domain_names = encode_names(columns["domain"], domains, "domain", self._where)
        else:
            self.domains, self.domain_names = np.zeros(len(self.labels), dtype=np.int64), NO_DOMAINS
        self.splits = encode_splits(columns["split"], self._where) if "split" in columns else None
        self.ranks = np.array(columns["rank"], dtype=np.int64) if "rank" in columns else None
        self.fingerprint = fingerprint.of_file(path, cache)
        groups = self._file.metadata.num_row_groups
        sizes = [self._file.metadata.row_group(group).num_rows for group in range(groups)]
        self._first_rows = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._kept: OrderedDict[int, pa.Array] = OrderedDict()
        self._lock = threading.Lock()

    def image(self, index: int) -> Image.Image:
        where = f"{self._where} row {index}"
        group = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        value = self._images(group)[index - int(self._first_rows[group])].as_py()
        encoded = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(encoded, bytes):
            raise DataError(f"{where}: " + broken("image", "be encoded bytes", encoded))
        return decode(encoded, where)

    def _images(self, group: int) -> pa.ChunkedArray:
        with self._lock:
            if group not in self._kept:
                try:
                    self._kept[group] = self._file.read_row_group(group, columns=["image"]).column(0)
                except (pa.ArrowException, OSError) as error:
                    first, end = self._first_rows[group], self._first_rows[group + 1]
                    message = f"parquet must be readable: {self._where} rows {first}..{end - 1}: {error}"
                    raise DataError(message) from error
            self._kept.move_to_end(group)
            while len(self._kept) > 1 and sum(array.nbytes for array in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return self._kept[group]


def _columns(file: pq.ParquetFile, names: list[str]) -> dict[str, pa.ChunkedArray]:
    table = file.read(columns=names)
    return {name: table.column(name) for name in names}


def _declared_names(path: Path, metadata: dict[bytes, bytes]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Class and domain names from the JSON beside the file, else from metadata of ours or of the `datasets` library."""
    sidecar = path.with_suffix(".json")
    if sidecar.is_file():
        try:
            declared = json.loads(sidecar.read_text(encoding="utf-8"))
            return _names(declared.get("classes")), _names(declared.get("domains"))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise DataError(f"{sidecar}: must be JSON with lists of names `classes` and `domains`: {error}") from error
    if b"fedprompt" in metadata:
        declared = json.loads(metadata[b"fedprompt"])
        return _names(declared["classes"]), _names(declared["domains"])
    features: dict[str, Any] = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return _names(features.get("label", {}).get("names")), _names(features.get("domain", {}).get("names"))


def _names(values: Any) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"got {values!r}")
    return tuple(values)
