"""`fedprompt configs` lists the configs of the package and copies them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedprompt.config import config_files
from fedprompt.config.shipped_configs import names

pytestmark = pytest.mark.unit


def test_all_are_listed_with_what_they_are_for(fedprompt: Any) -> None:
    rows = json.loads(fedprompt("configs", "--json").out)
    assert [row["name"] for row in rows] == names()
    assert all(row["what"] for row in rows)
    (one,) = json.loads(fedprompt("configs", "configs/demo.yaml", "--json").out)
    assert one["what"].startswith("Six shops")


def test_a_copy_is_the_same_experiment_and_its_editor_finds_the_schema(fedprompt: Any, tmp_path: Path) -> None:
    answer = fedprompt("configs", "configs/clip.yaml", "configs/papers/pfedmoap/table4.yaml", "--copy", "mine")
    assert answer.code == 0, answer.err
    copied = tmp_path / "mine/table4.yaml"
    assert config_files.load(copied) == config_files.load("configs/papers/pfedmoap/table4.yaml")
    first = (tmp_path / "mine/clip.yaml").read_text().splitlines()[0]
    assert Path(first.partition("$schema=")[2]).is_file()


def test_an_existing_file_is_kept_unless_forced(fedprompt: Any, tmp_path: Path) -> None:
    (tmp_path / "clip.yaml").write_text("mine")
    refused = fedprompt("configs", "configs/clip.yaml", "--copy", ".")
    assert refused.code == 2
    assert "--copy must find no file of that name, or --force be given, got 'clip.yaml'" in refused.err
    assert (tmp_path / "clip.yaml").read_text() == "mine"
    assert fedprompt("configs", "configs/clip.yaml", "--copy", ".", "--force").code == 0
    assert (tmp_path / "clip.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["configs/clp.yaml"],
            "config must be a config of the package (`fedprompt configs` lists all), got 'configs/clp.yaml'; did you mean",
        ),
        (["../secrets.yaml", "--copy", "."], "config must be a config of the package"),
        (["--copy", "."], "names must be given with --copy"),
        (
            ["configs/pacs.yaml", "configs/results/pacs.yaml", "--copy", "."],
            "names must be of files with different names",
        ),
    ],
)
def test_what_cannot_be_listed_or_copied_is_refused(fedprompt: Any, words: list[str], complaint: str) -> None:
    answer = fedprompt("configs", *words)
    assert answer.code == 2
    assert complaint in answer.err
