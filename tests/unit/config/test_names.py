"""Misspelt names, names in another case, and sections that are given as a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedprompt.config import config_files
from fedprompt.config.settings import Config, parse
from fedprompt.core import registry
from fedprompt.errors import ConfigError, FedpromptError, did_you_mean, same_name

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {"lr": 0.1}}, "trian is not a known setting; did you mean 'train'?"),
        ({"train": {"momentm": 0.1}}, "train.momentm is not a known setting; did you mean 'train.momentum'?"),
        ({"rounds": 3}, "rounds is not a known setting; did you mean 'federation.rounds'?"),
        ({"attack": {"kindd": "noise"}}, "attack.kindd is not a known setting; did you mean 'attack.kind'?"),
        ({"train": {"optimizer": "adm"}}, "got 'adm'; did you mean 'adam'?"),
        ({"partition": {"scheme": "dirichlett"}}, "got 'dirichlett'; did you mean 'dirichlet'?"),
        ({"data": {"format": "parkuet"}}, "got 'parkuet'; did you mean 'parquet'?"),
        ({"aggregation": {"rule": "medain"}}, "got 'medain'; did you mean 'median'"),
        ({"privacy": "pfedmoap25"}, "did you mean 'pfedmoap-25'"),
        ({"zzz": 1}, "zzz is not a known setting"),
    ],
)
def test_a_misspelt_setting_or_name_is_told_with_the_nearest_one(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse(values)
    assert message in str(told.value)


def test_a_name_that_is_like_no_other_gets_no_suggestion() -> None:
    assert did_you_mean("zzz", ["fedvpt", "local"]) == ""


def test_a_part_of_a_name_is_enough_for_a_suggestion() -> None:
    assert did_you_mean("deep", ["fedvpt_deep_long_name", "local"]) == "; did you mean 'fedvpt_deep_long_name'?"


def test_a_second_suggestion_is_shown_only_if_it_is_nearly_as_like() -> None:
    assert did_you_mean("adm", ["adam", "adamw"]) == "; did you mean 'adam'?"
    assert did_you_mean("lrx", ["lra", "lrb"]) == "; did you mean 'lrb' or 'lra'?"


@pytest.mark.parametrize(
    ("given", "names", "found"),
    [
        ("Bird", ["bird", "cat"], "bird"),
        ("FFA-LoRA", ["ffa_lora"], "ffa_lora"),
        ("Bird", ["bird", "Bird"], "Bird"),
        ("BIRD", ["bird", "Bird"], None),
        ("dog", ["bird"], None),
    ],
)
def test_case_decides_only_between_names_that_differ_in_nothing_else(
    given: str, names: list[str], found: str | None
) -> None:
    assert same_name(given, names) == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "fedvtp"}, "got 'fedvtp'; did you mean 'fedvpt'"),
        ({"name": "fedvpt", "promt_tokens": 3}, "did you mean 'prompt_tokens'?"),
    ],
)
def test_a_misspelt_method_or_its_setting_is_told_with_the_nearest_one(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as told:
        registry.build(settings)
    assert message in str(told.value)


def test_names_in_another_case_are_the_same_run() -> None:
    loud = {"method": "FedVPT", "variant": "FedProx", "partition": {"scheme": "IID"}, "backbone": {"name": "Tiny"}}
    quiet = {"method": "fedvpt", "variant": "fedprox", "partition": {"scheme": "iid"}, "backbone": {"name": "tiny"}}
    first, second = (registry.completed(parse(values)) for values in (loud, quiet))
    assert (first.digest(), first.run_name) == (second.digest(), "run-fedvpt+fedprox-seed0")


def test_a_folder_with_the_name_of_a_backbone_in_another_case_stays_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Tiny").mkdir()
    assert parse({"backbone": {"name": "Tiny"}}).backbone.name == "Tiny"


def test_a_text_as_data_or_backbone_is_its_source_or_name() -> None:
    short, long = {"data": "tiny", "backbone": "tiny"}, {"data": {"source": "tiny"}, "backbone": {"name": "tiny"}}
    assert parse(short) == parse(long)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.yaml"
    path.write_text("data: {source: embedded, train_per_cell: 3}\nsweep: {data.test_per_cell: [1, 2]}\n")
    return path


def loaded(file: Path, *overrides: str) -> list[Config]:
    return config_files.load(file, overrides)


def test_data_on_the_command_line_replaces_the_source_alone(file: Path) -> None:
    found = loaded(file, "data=tiny")
    assert [(each.data.source, each.data.train_per_cell) for each in found] == [("tiny", 3)] * 2


def test_a_setting_inside_a_section_that_is_a_text_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("data: tiny\nscales: {small: {data: {train_per_cell: 2}}}\n")
    (one,) = loaded(path, "data.test_per_cell=1", "scale=small")
    assert (one.data.source, one.data.train_per_cell, one.data.test_per_cell) == ("tiny", 2, 1)


def test_a_misspelt_scale_is_told_with_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "sized.yaml"
    path.write_text("scales: {small: {seed: 1}}\n")
    with pytest.raises(FedpromptError, match=r"got 'smal'; did you mean 'small'\?"):
        loaded(path, "scale=smal")
