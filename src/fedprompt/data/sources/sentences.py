"""Labelled sentences: `text`, `label` and, when there, `domain`, `split`, `rank` and `group` of a CSV or parquet file.

Both kinds of file hold images as well (`csv_table.py`, `parquet.py`). One with a text and no image holds sentences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fedprompt.data.sources import csv_table, parquet
from fedprompt.data.sources.base import NO_DOMAINS, Source, encode_names, encode_splits
from fedprompt.errors import DataError, broken

TEXT_COLUMNS = ("text", "sentence", "content")
LONGEST = 2**20  # characters of a sentence
MOST = 2**28  # characters of all sentences of a set


class SentenceSource(Source):
    """Sentences in the order of the rows, all in memory."""

    holds = "sentences"

    def __init__(
        self,
        name: str,
        texts: Sequence[Any],
        labels: Sequence[Any] | None,
        *,
        classes: tuple[str, ...] | None = None,
        domains: Sequence[Any] | None = None,
        domain_names: tuple[str, ...] | None = None,
        splits: Sequence[Any] | None = None,
        ranks: np.ndarray | None = None,
        groups: np.ndarray | None = None,
    ) -> None:
        self.name = name
        self._texts = _checked(texts, name)
        self.labels, self.class_names = np.full(len(self._texts), -1, dtype=np.int64), ()
        if labels is not None:
            self.labels, self.class_names = encode_names(labels, classes, "label", name)
        self.domains, self.domain_names = np.zeros(len(self._texts), dtype=np.int64), NO_DOMAINS
        if domains is not None:
            self.domains, self.domain_names = encode_names(domains, domain_names, "domain", name)
        self.splits = None if splits is None else encode_splits(splits, name)
        self.ranks, self.groups = ranks, groups
        rows: list[Any] = [
            self._texts,
            self.labels.tolist(),
            self.class_names,
            self.domains.tolist(),
            self.domain_names,
        ]
        rows.append(None if self.splits is None else self.splits.tolist())
        rows += [column.tolist() for column in (ranks, groups) if column is not None]
        self.fingerprint = hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def image(self, index: int) -> Image.Image:
        raise DataError(broken(f"{self.name} row {index}", "be an image", "a sentence"))

    def sentence(self, index: int) -> str:
        return self._texts[index]


def _checked(texts: Sequence[Any], where: str) -> list[str]:
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where} row {row}: " + broken("text", "be a sentence", text))
        if len(text) > LONGEST:
            raise DataError(f"{where} row {row}: " + broken("text", f"have at most {LONGEST} characters", len(text)))
    if (total := sum(map(len, texts))) > MOST:
        raise DataError(f"{where}: " + broken("sentences", f"have at most {MOST} characters together", total))
    return list(texts)


def csv_sentences(path: Path, required: Sequence[str] = ("label",)) -> SentenceSource | None:
    """The sentences of a CSV file; None if it lists image files. Those to be predicted need no label."""
    head = csv_table.head(path)
    if not set(head) & set(TEXT_COLUMNS) or set(head) & set(csv_table.COLUMNS["path"]):
        return None
    known = {"text": TEXT_COLUMNS, **{name: found for name, found in csv_table.COLUMNS.items() if name != "path"}}
    columns = csv_table.read_table(path, known, required=("text", *required))
    return SentenceSource(
        path.stem,
        columns["text"],
        columns.get("label"),
        classes=csv_table.names_in_order(columns["label"]) if "label" in columns else None,
        domains=columns.get("domain"),
        domain_names=csv_table.names_in_order(columns["domain"]) if "domain" in columns else None,
        splits=columns.get("split"),
        ranks=csv_table.rank_numbers(columns["rank"], path.name) if "rank" in columns else None,
        groups=parquet.group_numbers(columns["group"], path.name) if "group" in columns else None,
    )


def parquet_sentences(path: Path, required: Sequence[str] = ("label",)) -> SentenceSource | None:
    """The sentences of a parquet file; None if it holds images, or is no parquet file."""
    try:
        schema = pq.read_schema(path, memory_map=True)
        present = schema.names
        text = next((name for name in TEXT_COLUMNS if name in present), None)
        if text is None or "image" in present:
            return None
        words = [field.name for field in schema if parquet.is_text(field.type)]
        # a text in a million rows is one object
        file = pq.ParquetFile(path, memory_map=True, read_dictionary=words)
        parquet.check_rows(path, file.metadata.num_rows)
        for column in required:
            if column not in present:
                raise DataError(f"{path}: " + broken("parquet columns", f"include {column!r}", present))
        small = [name for name in ("label", "domain", "split", "rank", "group") if name in present]
        columns = {
            name: parquet.column_values(rows) for name, rows in parquet.small_columns(file, [text, *small]).items()
        }
    except (pa.ArrowException, OSError, ValueError):
        return None  # `ParquetSource` says what is wrong
    classes, domains = parquet.declared_names(path, file.schema_arrow.metadata or {})
    return SentenceSource(
        path.stem,
        columns[text],
        columns.get("label"),
        classes=classes,
        domains=columns.get("domain"),
        domain_names=domains,
        splits=columns.get("split"),
        ranks=parquet.rank_numbers(columns["rank"], path.name) if "rank" in columns else None,
        groups=parquet.group_numbers(columns["group"], path.name) if "group" in columns else None,
    )
