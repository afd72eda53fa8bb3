"""Labelled sentences from tables: the same columns as for images, with a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedprompt.config import DataConfig
from fedprompt.data.partition.split import train_and_test
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.sentences import SentenceSource
from fedprompt.data.sources.subset import of_classes
from fedprompt.errors import DataError

pytestmark = pytest.mark.unit

ROWS = {
    "text": ["good, cheap", "bad", "fine", "awful"],
    "label": ["yes", "no", "yes", "no"],
    "domain": ["film", "film", "book", "book"],
    "split": ["train", "test", "train", "test"],
}


def opened(path: Path) -> SentenceSource:
    source = open_source(DataConfig(source=str(path)), path.parent)
    assert isinstance(source, SentenceSource)
    return source


def written(folder: Path, kind: str, rows: dict[str, list[Any]] = ROWS) -> Path:
    if kind == "csv":
        lines = [",".join(rows), *(",".join(f'"{value}"' for value in row) for row in zip(*rows.values(), strict=True))]
        (folder / "set.csv").write_text("\n".join(lines) + "\n")
        return folder / "set.csv"
    if kind == "parquet":
        pq.write_table(pa.table(rows), folder / "set.parquet")
        return folder / "set.parquet"
    parts = {name: [i for i, split in enumerate(rows["split"]) if split == name] for name in ("train", "test")}
    columns = [name for name in rows if name != "split"]
    splits = {
        name: datasets.Dataset.from_dict({column: [rows[column][i] for i in places] for column in columns})
        for name, places in parts.items()
    }
    datasets.DatasetDict(splits).save_to_disk(folder / "set")
    return folder / "set"


@pytest.mark.parametrize("kind", ["csv", "parquet", "hub"])
def test_a_table_with_a_text_holds_sentences(tmp_path: Path, kind: str) -> None:
    source = opened(written(tmp_path, kind))
    assert source.holds == "sentences"
    assert source.class_names == ("no", "yes")
    assert source.domain_names == ("book", "film")
    found = {
        (source.sentence(i), source.class_names[source.labels[i]], source.domain_names[source.domains[i]], split)
        for i, split in enumerate((source.splits if source.splits is not None else np.array([])).tolist())
    }
    assert found == set(zip(*ROWS.values(), strict=True))


def test_the_fingerprint_follows_the_words_and_labels(tmp_path: Path) -> None:
    first = opened(written(tmp_path, "csv")).fingerprint
    assert opened(written(tmp_path, "parquet")).fingerprint == first
    changed = {**ROWS, "text": ["good, cheap", "bad", "fine", "awfully"]}
    assert opened(written(tmp_path, "parquet", changed)).fingerprint != first
    assert opened(written(tmp_path, "csv", {**ROWS, "label": ["yes", "yes", "yes", "no"]})).fingerprint != first


def test_a_selection_of_sentences_holds_sentences(tmp_path: Path) -> None:
    part = of_classes(opened(written(tmp_path, "csv")), ("no",))
    assert part.holds == "sentences"
    assert [part.sentence(i) for i in range(len(part))] == ["bad", "awful"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ["good", " ", "fine", "awful"]}, "row 1: text must"),
        ({"split": ["train", "exam", "train", "test"]}, "row 1: split must be one of"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, kind: str, changes: dict[str, list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(written(tmp_path, kind, {**ROWS, **changes}))


@pytest.mark.parametrize("kind", ["csv", "parquet", "hub"])
def test_a_missing_label_is_said(tmp_path: Path, kind: str) -> None:
    rows = {name: values for name, values in ROWS.items() if name != "label"}
    with pytest.raises(DataError, match="label"):
        opened(written(tmp_path, kind, rows))


def test_sentences_are_no_images_and_images_no_sentences(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be an image, got 'a sentence'"):
        opened(written(tmp_path, "csv")).image(0)
    with pytest.raises(DataError, match="must be a sentence, got 'an image'"):
        open_source(DataConfig(source="tiny"), tmp_path).sentence(0)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_texts_of_one_group_stay_on_one_side(tmp_path: Path, kind: str) -> None:
    rows: dict[str, list[Any]] = {
        "text": [f"words {i}" for i in range(40)],
        "label": [("no", "yes")[i % 2] for i in range(40)],
        "group": [f"writer {i // 4}" for i in range(40)],
    }
    source = opened(written(tmp_path, kind, rows))
    assert source.groups is not None
    assert np.array_equal(source.groups, np.arange(40) // 4)
    train, test = train_and_test(source, DataConfig(source="set"))
    assert not set(source.groups[train]) & set(source.groups[test])


@pytest.mark.parametrize("column", ["rank", "group"])
def test_the_fingerprint_follows_what_decides_the_split(tmp_path: Path, column: str) -> None:
    found = {opened(written(tmp_path, "csv")).fingerprint}
    for numbers in ([0, 1, 2, 3], [0, 1, 1, 0], [0, 0, 1, 1]):
        found.add(opened(written(tmp_path, "csv", {**ROWS, column: numbers})).fingerprint)
    assert len(found) == 4
