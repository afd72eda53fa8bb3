"""A CSV file of paths and labels: what is read, and what is said of a file that is wrong."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedprompt.config import DataConfig
from fedprompt.data.sources import csv_table
from fedprompt.data.sources.open import Source, detect_format, open_source
from fedprompt.errors import DataError

pytestmark = pytest.mark.unit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four grey images side by side; the n-th has the grey value n."""
    folder = tmp_path / "set"
    folder.mkdir()
    for value in range(4):
        buffer = io.BytesIO()
        Image.new("RGB", (6, 4), (value,) * 3).save(buffer, "PNG")
        (folder / f"{value}.png").write_bytes(buffer.getvalue())
    return folder


def listed(root: Path, text: str, name: str = "set.csv") -> Path:
    path = root / name
    path.write_text(text, encoding="utf-8")
    return path


def opened(path: Path, cache: Path) -> Source:
    return open_source(DataConfig(source=str(path)), cache)


def test_rows_keep_their_order_and_labels_are_sorted_names(root, cache):
    path = listed(root, "path,label\n2.png,dog\n0.png,cat\n1.png,dog\n")
    source = opened(path, cache)
    assert detect_format(str(path)) == "csv"
    assert (source.class_names, source.labels.tolist()) == (("cat", "dog"), [1, 0, 1])
    assert [source.image(row).getpixel((0, 0))[0] for row in range(3)] == [2, 0, 1]
    assert (source.domain_names, source.splits, source.ranks) == (("all",), None, None)


def test_domains_splits_and_ranks_are_read(root, cache):
    text = "file;class;site;split;rank\n0.png;a;north;train;3\n1.png;a;south;validation;0\n"
    source = opened(listed(root, text), cache)
    assert (source.domain_names, source.domains.tolist()) == (("north", "south"), [0, 1])
    assert source.splits.tolist() == ["train", "val"]
    assert source.ranks.tolist() == [3, 0]


def test_numbers_are_names_in_the_order_of_numbers(root, cache):
    source = opened(listed(root, "path,label\n0.png,10\n1.png,9\n"), cache)
    assert (source.class_names, source.labels.tolist()) == (("9", "10"), [1, 0])


@pytest.mark.parametrize(
    "text", ["\ufeffpath,label\r\n0.png,a\r\n", 'Path\tLabel\n"0.png"\ta\n', "path , label\n 0.png , a\n\n"]
)
def test_marks_of_other_programs_do_no_harm(root, cache, text):
    assert opened(listed(root, text), cache).class_names == ("a",)


def test_a_flat_folder_with_one_csv_file_is_that_file(root, cache):
    listed(root, "path,label\n0.png,a\n")
    assert detect_format(str(root)) == "csv"
    assert len(opened(root, cache)) == 1


def test_a_csv_file_beside_class_folders_does_not_decide(root, cache):
    for name in ("a", "b"):
        (root / name).mkdir()
    for value in range(4):
        (root / f"{value}.png").rename(root / "ab"[value % 2] / f"{value}.png")
    listed(root, "anything\n1\n")
    assert detect_format(str(root)) == "folder"


def test_identity_is_that_of_images_and_labels_not_of_other_columns(root, cache):
    def identity(text: str) -> str:
        return opened(listed(root, text), cache).fingerprint

    plain = identity("path,label\n0.png,a\n1.png,b\n")
    assert identity("path,label,note\n0.png,a,x\n1.png,b,y\n") == plain
    assert identity("path,label\n0.png,a\n1.png,a\n") != plain
    assert identity("path,label\n0.png,a\n2.png,b\n") != plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "set.csv: columns must include 'path' (or image, file, filename, file_name, image_path), got []"),
        (
            "path,lable\n0.png,a\n",
            "columns must include 'label' (or class, class_name, category), got ['path', 'lable']",
        ),
        ("path,label,label\n0.png,a,b\n", "columns must have different names"),
        ("path,label\n", "rows must be there below the names of the columns, got 0"),
        ("path,label\n0.png,a\n1.png\n", "set.csv row 1: values must be 2 as columns, got 1"),
        ("path,label\n0.png,\n", "set.csv row 0: label must not be empty, got ''"),
        ("path,label\n9.png,a\n", "set.csv row 0: path must be a file in "),
        ("path,label\n0.png,a\n./0.png,b\n", "set.csv row 1: path must be listed once (row 0), got './0.png'"),
        (
            "path,label\n/etc/passwd,a\n",
            "path must be inside the folder of the CSV file, and relative to it, got '/etc/passwd'",
        ),
        ("path,label\n../set/0.png,a\n", "path must be inside the folder of the CSV file, and relative to it"),
        ("path,label\n0.png\0,a\n", "path must be inside the folder of the CSV file, and relative to it"),
        ("path,label,split\n0.png,a,training\n", "split must be one of"),
        ("path,label,rank\n0.png,a,-1\n", "rank must be a whole number of at least 0, got '-1'"),
        ('path,label\n"0.png,a\n', "must be a readable CSV file in UTF-8"),
    ],
)
def test_a_wrong_file_is_told_by_row_rule_and_value(root, cache, text, message):
    with pytest.raises(DataError) as told:
        opened(listed(root, text), cache)
    assert message in str(told.value)


def test_a_file_that_is_not_text_is_refused(root, cache):
    (root / "set.csv").write_bytes(b"path,label\n\xff\xfe\n")
    with pytest.raises(DataError, match="must be a readable CSV file in UTF-8"):
        opened(root / "set.csv", cache)


def test_a_value_of_endless_length_is_refused(root, cache):
    with pytest.raises(DataError, match="field larger than field limit"):
        opened(listed(root, f"path,label\n0.png,{'a' * 200_000}\n"), cache)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(root, cache, monkeypatch):
    monkeypatch.setattr(csv_table, "MOST_BYTES", 10)
    with pytest.raises(DataError, match="must have at most 10 bytes, got more"):
        opened(listed(root, "path,label\n0.png,a\n"), cache)


def test_a_damaged_image_is_told_by_its_file(root, cache):
    (root / "0.png").write_bytes(b"no image")
    source = opened(listed(root, "path,label\n0.png,a\n1.png,a\n"), cache)
    with pytest.raises(DataError, match=r"image must be readable: .*0\.png"):
        source.image(0)
    assert np.asarray(source.image(1)).shape == (4, 6, 3)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """An image outside the folder, grey value 99, and a text that is none of its business."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    Image.new("RGB", (6, 4), (99,) * 3).save(folder / "other.png")
    (folder / "secret").write_text("password: 1234")
    return folder


@pytest.mark.parametrize("text", ["../elsewhere/other.png", "{elsewhere}/other.png", "a/../../elsewhere/other.png"])
def test_the_table_cannot_name_what_is_outside_the_folder(root, cache, elsewhere, text):
    path = listed(root, f"path,label\n0.png,a\n{text.format(elsewhere=elsewhere)},b\n")
    with pytest.raises(DataError, match="row 1: path must be inside the folder of the CSV file"):
        opened(path, cache)


def test_links_are_followed_as_in_folders_of_images_and_other_files_are_not_shown(root, cache, elsewhere):
    for folder in (root, root / "tree" / "a", root / "tree" / "b"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "link.png").symlink_to(elsewhere / "other.png")
        (folder / "text.png").symlink_to(elsewhere / "secret")
    table = opened(listed(root, "path,label\nlink.png,a\ntext.png,b\n"), cache)
    tree = opened(root / "tree", cache)
    for source in (table, tree):
        assert source.image(0).getpixel((0, 0)) == (99, 99, 99)
        with pytest.raises(DataError, match=r"text.png: it is none of PNG") as told:
            source.image(1)
        assert "password" not in str(told.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_what_would_be_read_without_end_is_refused(root, cache, kind):
    """Both hung for ever when the folder was opened; an archive can hold them."""
    odd = root / "tree" / "a" / "odd.png"
    odd.parent.mkdir(parents=True)
    os.mkfifo(odd) if kind == "pipe" else odd.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"data\.source must hold plain files"):
        opened(root / "tree", cache)
    with pytest.raises(DataError, match="path must be a file in"):
        opened(listed(root, "path,label\n0.png,a\ntree/a/odd.png,b\n"), cache)
