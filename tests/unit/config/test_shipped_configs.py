"""Configs of the package by their names, in any folder; `fedprompt configs` lists and copies them."""

from __future__ import annotations

from pathlib import Path

import documents
import pytest

from fedprompt.config import config_files
from fedprompt.config.shipped_configs import FOLDER, headline, located, names
from fedprompt.errors import ConfigError
from fedprompt.papers import paper_configs

pytestmark = pytest.mark.unit


def test_nothing_in_the_project_is_a_link() -> None:
    folders = (documents.ROOT / name for name in ("src", "docs", "benchmarks", "tests"))
    links = [path for folder in folders for path in folder.rglob("*") if path.is_symlink()]
    assert links == []
    assert not (documents.ROOT / "configs").exists()


def test_every_config_has_a_name_and_a_headline() -> None:
    assert names()[0] == "configs/clip.yaml"
    assert {"configs/demo.yaml", "configs/results/pacs.yaml", "configs/papers/pfedmoap/table1.yaml"} <= set(names())
    assert len(names()) == len(set(names())) == len(list(FOLDER.rglob("*.yaml")))
    assert all(headline(located(name)) for name in names())


def test_a_name_is_understood_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = config_files.load("configs/papers/pfedmoap/table1.yaml", ["scale=small"])
    assert made == config_files.load(paper_configs.find("pfedmoap/table1").path, ["scale=small"])
    assert paper_configs.find("configs/papers/pfedmoap/table1.yaml").name == "pfedmoap/table1"
    assert paper_configs.find("configs/results/pacs.yaml").header


def test_a_file_of_that_path_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "configs/demo.yaml"
    own.parent.mkdir()
    own.write_text("data: tiny\nbackbone: tiny\nmethod: local\n")
    assert [each.method["name"] for each in config_files.load("configs/demo.yaml")] == ["local"]
    assert len(config_files.load("./configs/demo.yaml")) == 1


@pytest.mark.parametrize(
    "path", ["demo.yaml", "configs/dem.yaml", "configs/../demo.yaml", "/configs/demo.yaml", "configs"]
)
def test_other_paths_are_no_names(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="config: cannot read"):
        config_files.read(path)


def test_a_misspelt_config_is_answered_with_a_file_beside_it_or_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "photos.yaml").write_text("method: fedvpt\n")
    with pytest.raises(ConfigError, match=r"No such file or directory; did you mean '.*photos\.yaml'"):
        config_files.read(tmp_path / "photo.yaml")
    with pytest.raises(ConfigError, match=r"did you mean 'configs/demo\.yaml'"):
        config_files.read("configs/dmeo.yaml")
