"""Images as encoded bytes in one parquet file: columns `image`, `label` and, when there, `domain`, `split` and `rank`.

`image` holds bytes, or the struct {bytes, path} that the `datasets` library writes. Labels and domains are integers or
names. Names of integers come from a JSON file of the same stem (keys `classes`, `domains`) or from the file's metadata.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fedprompt.data.cache import fingerprint
from fedprompt.data.sources.base import NO_DOMAINS, Source, decode, encode_names, encode_splits
from fedprompt.errors import DataError, broken
from fedprompt.io.bounded_read import read_json, strict_json

KEPT_BYTES = 256 * 2**20  # of decompressed row groups; compressed pages cannot be mapped straight into memory
PIECE = 8  # images that are read before their size is checked
LABEL_BYTES = 256 * 2**20  # of all columns but the images, uncompressed
GROUP_BYTES = (
    2**30
)  # of one row group, unless the file itself is as large: images do not shrink, so a small file has no more
NAMES_BYTES = 2**24  # of the JSON beside the file
NAME_COLUMNS = ("label", "domain", "split", "group")


class ParquetSource(Source):
    """Small columns are read at once; images row group by row group, and the latest groups are kept.

    Images to be predicted need no `label`: if it is not `required`, images without have label -1 and no class names.
    """

    def __init__(self, path: Path, cache: Path, required: tuple[str, ...] = ("image", "label")) -> None:
        try:
            self._bytes = path.stat().st_size
            schema = pq.read_schema(path, memory_map=True)
            present = schema.names
            if len(set(present)) < len(present):
                raise DataError(f"{path}: " + broken("parquet columns", "have different names", present))
            names = [field.name for field in schema if field.name in NAME_COLUMNS and is_text(field.type)]
            # a name in a million rows is one object
            self._file = pq.ParquetFile(path, memory_map=True, read_dictionary=names)
            rows = self._file.metadata.num_rows
            check_rows(path, rows)
            for column in required:
                if column not in present:
                    raise DataError(f"{path}: " + broken("parquet columns", f"include {column!r}", present))
            small = [column for column in ("label", "domain", "split", "rank", "group") if column in present]
            columns = {name: column_values(values) for name, values in small_columns(self._file, small).items()}
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(f"data.source must be a readable parquet file: {path}: {error}") from error
        metadata = self._file.schema_arrow.metadata or {}
        classes, domains = declared_names(path, metadata)
        self.name = path.stem
        self._where = path.name
        if "label" in columns:
            self.labels, self.class_names = encode_names(columns["label"], classes, "label", self._where)
        else:
            self.labels, self.class_names = np.full(rows, -1, dtype=np.int64), ()
        if "domain" in columns:
            self.domains, self.domain_names = encode_names(columns["domain"], domains, "domain", self._where)
        else:
            self.domains, self.domain_names = np.zeros(len(self.labels), dtype=np.int64), NO_DOMAINS
        self.splits = encode_splits(columns["split"], self._where) if "split" in columns else None
        self.ranks = rank_numbers(columns["rank"], self._where) if "rank" in columns else None
        self.groups = group_numbers(columns["group"], self._where) if "group" in columns else None
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
                    self._kept[group] = self._read_group(group)
                except (pa.ArrowException, OSError, ValueError) as error:
                    first, end = self._first_rows[group], self._first_rows[group + 1]
                    message = f"parquet must be readable: {self._where} rows {first}..{end - 1}: {error}"
                    raise DataError(message) from error
                while len(self._kept) > 1 and sum(array.nbytes for array in self._kept.values()) > KEPT_BYTES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(group)
            return self._kept[group]

    def _read_group(self, group: int) -> pa.ChunkedArray:
        """The images of a row group, read piece by piece: a page of few bytes can stand for many equal images."""
        most = max(GROUP_BYTES, 4 * self._bytes)
        pieces: list[pa.Array] = []
        for batch in self._file.iter_batches(batch_size=PIECE, row_groups=[group], columns=["image"]):
            pieces.append(batch.column(0))
            if sum(piece.nbytes for piece in pieces) > most:
                raise ValueError(f"must have at most {most} bytes of images in a row group, got more")
        images = pa.chunked_array(pieces, self._file.schema_arrow.field("image").type)
        rows = int(self._first_rows[group + 1] - self._first_rows[group])
        if len(images) != rows:
            raise ValueError(f"must have {rows} images, got {len(images)}")
        return images


def check_rows(path: Path, rows: int) -> None:
    """Raise if a file promises more rows than it can hold."""
    size = path.stat().st_size
    if not 0 <= rows <= size:
        raise DataError(f"{path}: " + broken("rows", f"be no more than the {size} bytes of the file", rows))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def column_values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column; equal names are one object."""
    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    values: list[Any] = []
    for chunk in column.chunks:
        names = chunk.dictionary.to_pylist()
        values += [None if index is None else names[index] for index in chunk.indices.to_pylist()]
    return values


def rank_numbers(values: list[Any], where: str) -> np.ndarray:
    for row, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 2**63:
            raise DataError(f"{where} row {row}: " + broken("rank", "be a whole number of at least 0", value))
    return np.array(values, dtype=np.int64)


def group_numbers(values: list[Any], where: str) -> np.ndarray:
    """A number for every image, the same for images of one group."""
    for row, value in enumerate(values):
        if value is None or type(value) is not type(values[0]):
            raise DataError(f"{where} row {row}: " + broken("group", "be all integers or all names", value))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def small_columns(file: pq.ParquetFile, names: list[str]) -> dict[str, pa.ChunkedArray]:
    """Labels and other small columns, after checks of their type and size."""
    for name in names:
        kind = file.schema_arrow.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (is_text(kind) or pa.types.is_integer(kind)):
            raise ValueError(broken(f"column {name!r}", "hold whole numbers or text", str(kind)))
    groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
    chunks = (group.column(place) for group in groups for place in range(group.num_columns))
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in names)
    if size > LABEL_BYTES:
        raise ValueError(broken("labels, domains, splits, ranks and groups", f"be at most {LABEL_BYTES} bytes", size))
    table = file.read(columns=names)
    return {name: table.column(name) for name in names}


def declared_names(path: Path, metadata: dict[bytes, bytes]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Class and domain names from the JSON beside the file, else from metadata of ours or of the `datasets` library."""
    sidecar = path.with_suffix(".json")
    if sidecar.is_file():
        try:
            declared = read_json(sidecar, NAMES_BYTES)
            return _names(declared.get("classes")), _names(declared.get("domains"))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise DataError(f"{sidecar}: must be JSON with lists of names `classes` and `domains`: {error}") from error
    try:
        if b"fedprompt" in metadata:
            declared = strict_json(metadata[b"fedprompt"].decode())
            return _names(declared["classes"]), _names(declared["domains"])
        described = strict_json(metadata.get(b"huggingface", b"{}").decode(), finite=False)
        features: dict[str, Any] = described.get("info", {}).get("features", {})
        return _names(features.get("label", {}).get("names")), _names(features.get("domain", {}).get("names"))
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise DataError(f"{path}: metadata must be JSON that names classes and domains: {error}") from error


def _names(values: Any) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"got {str(values)[:200]}")
    return tuple(values)
