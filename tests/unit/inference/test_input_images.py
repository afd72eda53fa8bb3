"""What paths stand for: files, folders and parquet files as pictures, one after the other."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedprompt.errors import DataError
from fedprompt.inference.input_images import Item, items

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images in folders, of which two have the name of a class, and what is none."""
    root = tmp_path / "set"
    for name in ("b.png", "a.PNG", "cat/2.png", "cat/1.png", "deep/down/dog/3.png", ".hidden/4.png", "cat/.5.png"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    (root / "notes.txt").write_text("no image")
    return root


def found(tmp_path: Path, *paths: Path, split: str | None = None) -> list[Item]:
    return list(items(paths, ("cat", "dog"), tmp_path / "cache", split))


def test_a_folder_stands_for_the_images_below_it_in_the_order_of_their_names(folder: Path, tmp_path: Path) -> None:
    names = [str(Path(each.name).relative_to(folder)) for each in found(tmp_path, folder)]
    assert names == ["a.PNG", "b.png", "cat/1.png", "cat/2.png", "deep/down/dog/3.png"]


def test_a_folder_with_the_name_of_a_class_labels_its_images(folder: Path, tmp_path: Path) -> None:
    assert [each.label for each in found(tmp_path, folder)] == [None, None, "cat", "cat", "dog"]


def test_the_folder_that_was_asked_for_labels_nothing(folder: Path, tmp_path: Path) -> None:
    assert [each.label for each in found(tmp_path, folder / "cat", folder / "cat/1.png")] == [None, None, None]


def test_links_in_circles_end(folder: Path, tmp_path: Path) -> None:
    (folder / "again").symlink_to(folder, target_is_directory=True)
    assert len(found(tmp_path, folder)) == 5


@pytest.mark.parametrize("columns", [("image", "label"), ("image",)])
def test_a_parquet_file_stands_for_its_rows_with_or_without_labels(
    columns: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    encoded = (folder / "b.png").read_bytes()
    values = {"image": [encoded, encoded], "label": ["dog", "fish"]}
    path = tmp_path / "two.parquet"
    pq.write_table(pa.table({name: values[name] for name in columns}), path)
    rows = found(tmp_path, path)
    assert [each.name for each in rows] == [f"{path}:0", f"{path}:1"]
    assert [each.label for each in rows] == (["dog", "fish"] if "label" in columns else [None, None])
    assert rows[1].load().size == (4, 4)


def test_of_a_split_only_its_rows_are_asked_about(folder: Path, tmp_path: Path) -> None:
    encoded, path = (folder / "b.png").read_bytes(), tmp_path / "split.parquet"
    pq.write_table(pa.table({"image": [encoded] * 3, "split": ["train", "valid", "test"]}), path)
    rows = {split: [each.name for each in found(tmp_path, path, split=split)] for split in ("test", "validation")}
    assert rows == {"test": [f"{path}:2"], "validation": [f"{path}:1"]}
    pq.write_table(pa.table({"image": [encoded]}), path)
    (without,) = found(tmp_path, path, split="test")
    with pytest.raises(DataError, match="parquet columns must include 'split'"):
        without.load()


def test_what_cannot_be_read_is_told_when_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    wrong = [tmp_path / name for name in ("bad.parquet", "bad.png", "empty", "pipe.png", "missing.png")]
    rules = ["readable parquet", "image must be readable", "hold images", "existing file", "existing file"]
    listed = found(tmp_path, *wrong, folder / "b.png")
    assert len(listed) == 6
    for item, rule in zip(listed, rules, strict=False):
        with pytest.raises(DataError, match=rule):
            item.load()
    assert listed[-1].load().size == (4, 4)


def test_a_name_that_is_no_text_can_be_written(folder: Path, tmp_path: Path) -> None:
    os.rename(os.fsencode(folder / "b.png"), os.fsencode(folder) + b"/b\xff.png")
    names = [each.name for each in found(tmp_path, folder)]
    assert names[1].endswith("b\\xff.png")
    assert all(name.encode() for name in names)
