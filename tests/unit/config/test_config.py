"""Settings: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedprompt import config
from fedprompt.config import config_files
from fedprompt.core import registry
from fedprompt.errors import ConfigError
from fedprompt.federation.loop import is_evaluated

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"federation": {"fraction": 1.5}}, "federation.fraction must be less than or equal to 1, got 1.5"),
        ({"federation": {"fraction": 0}}, "federation.fraction must be greater than 0, got 0"),
        ({"federation": {"rounds": 0}}, "federation.rounds must be greater than or equal to 1, got 0"),
        ({"federation": {"rouds": 3}}, "federation.rouds is not a known setting"),
        ({"colour": "red"}, "colour is not a known setting"),
        ({"train": {"epochs": "3"}}, "train.epochs must be a valid integer, got '3'"),
        ({"train": {"epochs": True}}, "train.epochs must be a valid integer, got True"),
        ({"train": {"lrs": {"head.*": -1}}}, "train.lrs.head.* must be greater than or equal to 0, got -1"),
        ({"train": {"momentum": 1.0}}, "train.momentum must be less than 1, got 1.0"),
        ({"seed": -1}, "seed must be greater than or equal to 0, got -1"),
        ({"name": "../escape"}, "name must match pattern"),
        ({"method": {"head": "local"}}, "method must have a name, got {'head': 'local'}"),
        ({"variant": {"name": ["fedprox"]}}, "variant must have a name"),
        ({"backbone": {"device": "meta"}}, "backbone.device must match pattern"),
        (
            {"backbone": {"dtype": "float16"}},
            "backbone.dtype must be 'float32', 'bfloat16' or 'float64', got 'float16'",
        ),
        ({"partition": {"alpha": float("inf")}}, "partition.alpha must"),
    ],
)
def test_a_bad_value_is_told_by_field_rule_and_value(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(values)
    assert message in str(caught.value)


def test_every_bad_value_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse({"seed": -1, "train": {"epochs": 0}})
    assert len(str(caught.value).splitlines()) == 2


def test_seed_zero_is_a_seed() -> None:
    assert config.parse({"seed": 0}).seed == 0


def test_the_text_false_is_not_a_boolean() -> None:
    class Flags(config.Section):
        on: bool = True

    with pytest.raises(ValueError, match="valid boolean"):
        Flags.model_validate_json('{"on": "False"}')
    assert Flags.model_validate_json('{"on": false}').on is False


def test_the_hash_does_not_depend_on_where_a_run_is_written() -> None:
    here, there = (
        config.parse({"output": {"directory": "a"}}),
        config.parse({"output": {"directory": "b"}, "name": "other"}),
    )
    assert here.digest() == there.digest()


def test_the_hash_depends_on_every_setting_that_matters() -> None:
    plain = config.parse({})
    assert plain.digest() != config.parse({"seed": 1}).digest()
    assert plain.digest() != config.parse({"train": {"lr": 0.02}}).digest()


def test_runs_that_differ_in_the_seed_are_one_family() -> None:
    assert config.parse({"seed": 1}).family() == config.parse({"seed": 2}).family()


def test_the_hash_is_the_same_in_every_version_of_python() -> None:
    assert config.settings._digest({"b": [1, 0.5, None], "a": "x"}) == "dc13af45fce68dcc"


def test_overrides_are_yaml_and_reach_into_sections(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("train: {lr: 0.1}\n")
    (made,) = config_files.load(path, ["train.lr=0.5", "method=head_tune", "method.head=local", "train.lrs.prompt=2"])
    assert (made.train.lr, made.method, made.train.lrs) == (
        0.5,
        {"name": "head_tune", "head": "local"},
        {"prompt": 2.0},
    )
    assert made.name == "x"


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("2E5", 2e5), ("1.5e+2", 150.0), (".5e1", 5.0), ("3", 3.0)]
)
def test_numbers_are_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"train: {{weight_decay: {text}}}\n")
    (made,) = config_files.load(path, [f"train.lr={text}"])
    assert (made.train.lr, made.train.weight_decay) == (value, value)


@pytest.mark.parametrize("override", ["train.lr", "=3", "seed.x=3", "train.lr=[1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="override"):
        config_files.load(path, [override])


def test_a_sweep_is_the_product_of_its_lists_and_the_seeds(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("sweep: {method: [local, {name: fedvpt, head: shared}], train.lr: [0.1, 0.2]}\n")
    made = config_files.load(path, seeds=[0, 1])
    assert len(made) == 8
    assert {(m.method["name"], m.train.lr, m.seed) for m in made} == {
        (name, lr, seed) for name in ("local", "fedvpt") for lr in (0.1, 0.2) for seed in (0, 1)
    }


def test_cases_set_several_settings_together(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text("sweep: {cases: [{method: fedvpt, train.lr: 0.1}, {method: head_tune, train.lr: 0.2}]}")
    runs = config_files.load(path, seeds=[0, 1])
    assert [(run.seed, run.method["name"], run.train.lr) for run in runs] == [
        (0, "fedvpt", 0.1),
        (0, "head_tune", 0.2),
        (1, "fedvpt", 0.1),
        (1, "head_tune", 0.2),
    ]
    assert [run.train.lr for run in config_files.load(path, ["method=local"])] == [0.1, 0.2]
    assert [
        (run.method["name"], run.train.lr) for run in config_files.load(path, ["method=local", "train.lr=0.3"])
    ] == [("local", 0.3)]


@pytest.mark.parametrize("cases", ["[]", "[fedvpt]", "{method: fedvpt}"])
def test_cases_that_are_no_mappings_are_refused(tmp_path: Path, cases: str) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(f"sweep: {{cases: {cases}}}")
    with pytest.raises(ConfigError, match="sweep"):
        config_files.load(path)


def test_runs_of_a_sweep_never_share_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "sweep: {method: [{name: fedvpt, head: local}, {name: fedvpt, head: shared}, local], train.lr: [0.1, 0.2]}\n"
    )
    names = [made.run_name for made in config_files.load(path)]
    assert len(set(names)) == 6
    assert "x-headlocal-lr0.1-fedvpt-seed0" in names


def test_a_setting_given_by_hand_is_not_swept(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("sweep: {method: [local, fedvpt], train.lr: [0.1, 0.2]}\n")
    made = config_files.load(path, ["method=head_tune", "train.lr=0.5"])
    assert [(each.method, each.train.lr) for each in made] == [({"name": "head_tune"}, 0.5)]


def test_a_setting_inside_a_swept_section_changes_every_run(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("sweep: {method: [local, {name: fedvpt, prompt_tokens: 9}]}\n")
    made = config_files.load(path, ["method.prompt_tokens=3"])
    assert [each.method for each in made] == [{"name": name, "prompt_tokens": 3} for name in ("local", "fedvpt")]


SCALED = """
train: {epochs: 5, lr: 0.01, lrs: {encoder.*: 0.001}}
federation: {rounds: 100}
method: fedvpt
sweep: {partition.domains_per_client: [1, 2, 3], train.batch_size: [64, 128]}
scales:
  small:
    train: {epochs: 1, lrs: {head.*: 0.002}}
    method: {prompt_tokens: 4}
    sweep: {partition.domains_per_client: [1, 2], train.batch_size: null}
  fixed:
    partition: {domains_per_client: 4}
"""


def scaled(folder: Path, *overrides: str, text: str = SCALED) -> list[config.Config]:
    path = folder / "x.yaml"
    path.write_text(text)
    return config_files.load(path, overrides)


def test_without_a_scale_the_scales_are_ignored(tmp_path: Path) -> None:
    made = scaled(tmp_path)
    assert len(made) == 6
    assert {(each.train.epochs, each.federation.rounds) for each in made} == {(5, 100)}
    assert not any("small" in each.name for each in made)


@pytest.mark.parametrize("overrides", [("scale=small", "seed=3"), ("seed=3", "scale=small")])
def test_a_scale_is_merged_over_the_file_wherever_it_is_given(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    made = scaled(tmp_path, *overrides)
    assert [each.partition.domains_per_client for each in made] == [1, 2]
    for each in made:
        assert (each.train.epochs, each.train.lr, each.train.batch_size, each.seed) == (1, 0.01, 32, 3)
        assert each.train.lrs == {"encoder.*": 0.001, "head.*": 0.002}
        assert each.method == {"name": "fedvpt", "prompt_tokens": 4}
        assert each.federation.rounds == 100


def test_an_override_wins_over_the_scale(tmp_path: Path) -> None:
    (made,) = scaled(
        tmp_path, "train.epochs=7", "partition.domains_per_client=5", "scale=small", "method.prompt_tokens=9"
    )
    assert (made.train.epochs, made.partition.domains_per_client, made.method["prompt_tokens"]) == (7, 5, 9)


def test_a_setting_of_a_scale_is_not_swept(tmp_path: Path) -> None:
    made = scaled(tmp_path, "scale=fixed")
    assert [(each.partition.domains_per_client, each.train.batch_size) for each in made] == [(4, 64), (4, 128)]


def test_the_name_of_a_run_tells_the_scale_unless_it_is_given(tmp_path: Path) -> None:
    assert {each.name for each in scaled(tmp_path, "scale=small")} == {
        "x-small-domains_per_client1",
        "x-small-domains_per_client2",
    }
    assert [each.name for each in scaled(tmp_path, "scale=small", "name=y", "partition.domains_per_client=1")] == ["y"]
    assert [each.name for each in scaled(tmp_path, "scale=s", text="name: a\nscales: {s: {name: b}}")] == ["b"]


def test_an_unknown_scale_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scale must be one of the config's scales \(small, fixed\), got 'large'"):
        scaled(tmp_path, "scale=large")
    with pytest.raises(ConfigError, match=r"scale must be one of the config's scales \(none\), got 'small'"):
        scaled(tmp_path, "scale=small", text="seed: 1")


@pytest.mark.parametrize("text", ["scales: 3", "scales: {small: 3}"])
def test_scales_that_are_no_overlays_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="scales must map names to sections of settings, got"):
        scaled(tmp_path, text=text)


def test_a_bad_value_inside_a_scale_is_told_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs must be greater than or equal to 1, got 0"):
        scaled(tmp_path, "scale=s", text="scales: {s: {train: {epochs: 0}}}")


def test_long_lists_in_a_sweep_do_not_make_names_that_no_folder_can_have(tmp_path: Path) -> None:
    lists = [[f"some class {letter}{number}" for number in range(40)] for letter in "ab"]
    path = tmp_path / "long.yaml"
    path.write_text(json.dumps({"sweep": {"data.classes": [*lists, ["cat"]], "train.epochs": [1, 2]}}))
    names = [config.run_name for config in config_files.load(path)]
    assert len(set(names)) == 6
    assert max(map(len, names)) < 200
    assert any("classes__cat__" in name for name in names), "what is short is written out"
    assert names == [config.run_name for config in config_files.load(path)]


def test_the_same_run_twice_in_a_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("sweep: {method: [local, local]}\n")
    with pytest.raises(ConfigError, match="same run twice"):
        config_files.load(path)


@pytest.mark.parametrize(
    "text", ["[1, 2]", "a: [", "seed: 1\nseed: 2", "sweep: 3", "sweep: {train.lr: 3}", "sweep: {train.lr: []}"]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        config_files.load(path)


def test_a_missing_file_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        config_files.load(tmp_path / "nowhere.yaml")


def test_a_difference_names_the_field_and_both_values() -> None:
    lines = config.difference({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "d": 3})
    assert lines == ["a.c: 2 -> 5"]


@pytest.mark.parametrize(("rounds", "last"), [(1, 1), (2, 1), (3, 1), (8, 2), (9, 3), (10, 3), (30, 10), (300, 10)])
def test_at_most_a_third_of_the_rounds_are_averaged_where_nothing_else_is_said(rounds: int, last: int) -> None:
    settings = config.parse({"federation": {"rounds": rounds}}).federation
    assert settings.last_rounds == last
    assert [
        is_evaluated(round, settings.model_copy(update={"evaluate_every": 1000})) for round in range(1, rounds + 1)
    ] == [round > rounds - last for round in range(1, rounds + 1)]


def test_a_given_number_of_last_rounds_is_kept() -> None:
    assert config.parse({"federation": {"rounds": 3, "evaluate_last": 10}}).federation.last_rounds == 10


def test_a_completed_config_holds_the_number_of_last_rounds() -> None:
    full = registry.completed(config.parse({"federation": {"rounds": 9}}))
    assert full.federation.evaluate_last == 3
    assert full.digest() == registry.completed(config.parse({"federation": {"rounds": 9, "evaluate_last": 3}})).digest()
