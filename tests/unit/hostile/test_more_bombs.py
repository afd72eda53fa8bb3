"""Small files that stand for much, found by a review: each is told before it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedprompt import config
from fedprompt.backbones.model_folder import folder_shape
from fedprompt.config import DataConfig, config_files
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.sources import parquet, sentences
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.data.sources.sentences import parquet_sentences
from fedprompt.errors import BackboneError, ConfigError, DataError
from fedprompt.io.bounded_read import strict_json
from fedprompt.metrics.accuracy import AVERAGED, is_summary

pytestmark = pytest.mark.unit


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table({"image": [b"x"] * 4, **columns}), path)
    return path


@pytest.mark.parametrize("labels", [[[1, 2]] * 4, [0.5] * 4, [{"a": 1}] * 4, [True] * 4])
def test_labels_are_numbers_or_text(tmp_path: Path, labels: list[Any]) -> None:
    with pytest.raises(DataError, match="column 'label' must hold whole numbers or text"):
        ParquetSource(write(tmp_path / "set.parquet", label=labels), tmp_path)


def test_labels_are_weighed_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "set.parquet", label=[letter * 5000 for letter in "abcd"])
    monkeypatch.setattr(parquet, "LABEL_BYTES", 10_000)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("they were read"))
    with pytest.raises(DataError, match="must be at most 10000 bytes"):
        ParquetSource(path, tmp_path)


def repeated(path: Path, text: str, rows: int) -> Path:
    """One text in many rows, which takes the place of one."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    table = pa.table({"text": texts, "label": ["a", "b"] * (rows // 2)})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    return path


def test_a_sentence_in_many_rows_is_one_in_memory(tmp_path: Path) -> None:
    """500 bytes became two gigabytes."""
    path = repeated(tmp_path / "set.parquet", "x" * 2**18, 200)
    assert path.stat().st_size < 2**10
    source = parquet_sentences(path)
    assert source is not None
    assert len({id(source.sentence(row)) for row in range(200)}) == 1


def test_sentences_are_counted_before_they_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "MOST", 2**20)
    with pytest.raises(DataError, match="sentences must have at most 1048576 characters together"):
        parquet_sentences(repeated(tmp_path / "set.parquet", "x" * 2**18, 200))


def test_sentences_have_no_more_rows_than_bytes(tmp_path: Path) -> None:
    path = repeated(tmp_path / "set.parquet", "x", 10_000)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"rows must be no more than the \d+ bytes of the file"):
        open_source(DataConfig(source=str(path)), tmp_path)


def test_a_model_folder_names_no_million_classes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_labels": 3_000_000}))
    with pytest.raises(BackboneError, match="num_labels must be in"):
        folder_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "vision_config": {"num_labels": 10**9}}))
    with pytest.raises(BackboneError, match="num_labels must be in"):
        folder_shape(tmp_path)


def test_a_sweep_is_weighed_before_it_is_expanded() -> None:
    base = {
        "data": {"classes": ["x" * 100] * 100},
        "sweep": {"seed": list(range(100)), "train.epochs": list(range(1, 100))},
    }
    with pytest.raises(ConfigError, match="bytes of settings in all its runs"):
        config_files.expand(base)


@pytest.mark.parametrize(
    ("section", "field"),
    [("data", "source"), ("backbone", "name"), ("output", "directory"), ("output", "cache"), ("partition", "manifest")],
)
@pytest.mark.parametrize("value", ["x" * 300, "a/" * 600, "a\0b"])
def test_a_path_is_one_a_file_system_can_have(section: str, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{field} must be a path of at most 1024 letters"):
        config.parse({section: {field: value}})


def test_half_a_character_is_no_text() -> None:
    assert strict_json('["\\ud83d\\ude00"]') == ["\U0001f600"]
    with pytest.raises(ValueError, match="surrogates"):
        strict_json('{"name": "\\ud800"}')


def test_a_client_has_a_name_of_sensible_length() -> None:
    client = {"name": "x" * 10**6, "train": [0], "test": [1]}
    raw = {
        "format": "fedprompt-manifest-1",
        "source": {"name": "s", "fingerprint": "f"},
        "classes": [],
        "domains": [],
        "clients": [client],
    }
    with pytest.raises(DataError, match="letters") as error:
        Manifest.from_json(json.dumps(raw))
    assert len(str(error.value)) < 3000


@pytest.mark.parametrize("diagnostics", [10**30, {"gate": "x"}, [1]])
def test_a_summary_holds_numbers(diagnostics: Any) -> None:
    figures = {**dict.fromkeys(AVERAGED, 0.5), "domains": {"photo": 0.5}}
    assert is_summary(figures)
    assert is_summary({**figures, "diagnostics": {"gate": 0.5}})
    assert not is_summary({**figures, "diagnostics": diagnostics})
