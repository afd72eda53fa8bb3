"""What is searched: rates by group of tensors, what a method declares, and what a config says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedprompt.client.factory import ExperimentFactory
from fedprompt.config import config_files
from fedprompt.core import registry
from fedprompt.core.recipe import group_of
from fedprompt.core.search_space import Choice, FloatRange, SearchSpace
from fedprompt.errors import ConfigError
from fedprompt.tuning.halving import counts, planned_rounds, stops
from fedprompt.tuning.space import (
    applied,
    entries_of,
    read_section,
    search_space,
    start_of,
    trained,
    with_plain_rates,
)

Make = Callable[..., dict[str, Any]]


def space_of(settings: Make, section: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, SearchSpace]:
    factory = ExperimentFactory(settings(**changes))
    world = factory.prepare().world
    return factory.config, search_space(factory.config, factory.method, world, section or {})


def test_every_group_of_tensors_has_a_range_of_a_hundredth_to_a_hundred_times_its_rate(settings: Make) -> None:
    _, space = space_of(settings, train={"lr": 0.05, "lrs": {"head.*": 0.001}})
    assert dict(space) == {
        "train.lrs.prompt": FloatRange(0.05 / 100, 0.05 * 100),
        "train.lrs.head.*": FloatRange(0.001 / 100, 0.001 * 100),
    }


def test_a_relative_rate_becomes_a_number_that_trials_can_change(settings: Make) -> None:
    factory = ExperimentFactory(settings(train={"lr": 0.05, "lrs": {"prompt": "10%", "head.*": 0.001}}))
    world = factory.prepare().world
    plain = with_plain_rates(factory.config, factory.method, world)
    rate = 0.1 * float(world.roles.shared["prompt"].double().square().mean().sqrt())
    assert plain.train.lrs == {"prompt": pytest.approx(rate), "head.*": 0.001}
    space = search_space(plain, factory.method, world, {})
    assert start_of(plain, space)["train.lrs.prompt"] == pytest.approx(rate)


def test_a_method_adds_its_own_settings_and_a_variant_too(settings: Make) -> None:
    _, space = space_of(settings, method={"name": "pfedbayespt"}, variant={"name": "fedprox"})
    assert space["method.kl_weight"] == FloatRange(1e-3, 10.0)
    assert space["variant.mu"] == FloatRange(1e-4, 1.0)
    assert {"train.lrs.encoder.*", "train.lrs.head.*"} <= set(space)


def test_copies_that_a_variant_makes_have_the_rates_of_their_originals(settings: Make) -> None:
    _, space = space_of(settings, variant={"name": "ditto"})
    assert [name for name in space if name.startswith("train.lrs.")] == ["train.lrs.prompt", "train.lrs.head.*"]


@pytest.mark.parametrize("name", sorted(registry.methods()))
def test_every_method_has_a_search_space_that_its_config_can_have(settings: Make, name: str) -> None:
    backbone = {"name": "tiny-clip" if registry.build({"name": name}).uses_text else "tiny"}
    train = {"momentum": 0.0} if name == "per_fedavg" else {}
    factory = ExperimentFactory(settings(method={"name": name}, backbone=backbone, train=train))
    world = factory.prepare().world
    space = search_space(factory.config, factory.method, world, {})
    names = trained(factory.method, world, factory.config.train)
    assert bool(space) == bool(names)
    start = start_of(factory.config, space)
    assert start == {} or applied(factory.config, start)
    rates = {group_of(tensor) for tensor in names}
    assert {key.removeprefix("train.lrs.").removesuffix(".*") for key in space if key.startswith("train.")} == rates


def test_chosen_rates_come_before_other_patterns(settings: Make) -> None:
    config, _ = space_of(settings, train={"lrs": {"*": 0.5, "head.*": 0.1}})
    changed = applied(config, {"train.lrs.head.*": 0.7})
    assert list(changed.train.lrs.items()) == [("head.*", 0.7), ("*", 0.5)]


def test_the_section_replaces_adds_and_removes(settings: Make) -> None:
    section = {
        "train.lrs.prompt": {"low": 0.1, "high": 1.0},
        "train.lrs.head.*": None,
        "train.momentum": [0.0, 0.9],
        "method.kl_weight": [1.0],  # fedvpt has no such setting
    }
    _, space = space_of(settings, section)
    assert dict(space) == {"train.lrs.prompt": FloatRange(0.1, 1.0), "train.momentum": Choice((0.0, 0.9))}


def test_null_for_a_section_removes_all_of_it(settings: Make) -> None:
    _, space = space_of(settings, {"train.lrs": None, "method.prompt_tokens": [1, 2]})
    assert dict(space) == {"method.prompt_tokens": Choice((1, 2))}


def test_entries_below_a_method_are_for_that_method_and_replace_those_for_all(settings: Make) -> None:
    section = {
        "train.lrs.prompt": {"low": 0.1, "high": 1.0},
        "train.lrs.head.*": [0.5],
        "fedvpt_deep": {"train.lrs.prompt": {"low": 0.2, "high": 2.0}, "train.momentum": [0.5]},
        "local": {"train.lrs": None},
    }
    _, plain = space_of(settings, section)
    assert dict(plain) == {"train.lrs.prompt": FloatRange(0.1, 1.0), "train.lrs.head.*": Choice((0.5,))}
    _, deep = space_of(settings, section, method={"name": "fedvpt_deep"})
    assert deep["train.lrs.prompt"] == FloatRange(0.2, 2.0)
    assert (deep["train.momentum"], deep["train.lrs.head.*"]) == (Choice((0.5,)), Choice((0.5,)))
    _, local = space_of(settings, section, method={"name": "local"})
    assert dict(local) == {}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([1], "tune must map settings"),
        ({"fedvpt": [1]}, "tune.fedvpt must be a setting of train, .*, or a method with a mapping of its settings"),
        ({"fedvpt": {"seed": [1]}}, "tune.fedvpt.seed must be a setting of train"),
        ({"fedvpt": {"train.lr": 3}}, "tune.fedvpt.train.lr must be a list of values"),
        ({"data.validation": [0.1]}, r"tune.data.validation must be a setting of train, method"),
        ({"seed": [0, 1]}, r"tune.seed must be a setting of"),
        ({"train.lr": 3}, "must be a list of values, a mapping with low, high"),
        ({"train.lr": []}, "a choice must be some different plain values"),
        ({"train.lr": [0.1, 0.1]}, "a choice must be some different plain values"),
        ({"train.lr": [[1]]}, "a choice must be some different plain values"),
        ({"train.lr": {"low": 1.0}}, "must be a list of values, a mapping with low, high"),
        ({"train.lr": {"low": 1.0, "high": 0.1}}, "a range must have a finite low below high"),
        ({"train.lr": {"low": 0.0, "high": 0.1}}, "a low above 0 where log is true"),
        ({"train.lr": {"low": "a", "high": 0.1}}, "must be a list of values, a mapping with low, high"),
    ],
)
def test_a_section_that_cannot_be_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_section(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train.momentum": [2.0]}, "train.momentum must be less than 1"),
        ({"method.prompt_tokens": [-1]}, "method.prompt_tokens must"),
        ({"method.depth": [1, 99]}, "method.depth must"),  # more than the backbone has
        ({"train.lrs.prompt": {"low": -1.0, "high": 1.0, "log": False}}, "train.lrs.prompt must"),
    ],
)
def test_a_value_that_the_config_cannot_have_is_refused(settings: Make, section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space_of(settings, section, method={"name": "fedvpt_deep"})


def test_a_config_with_the_section_is_a_config_like_any_other(tmp_path: Path, settings: Make) -> None:
    plain, tuned = settings(), {**settings(), "tune": {"train.lr": [0.1]}}
    digests = []
    for number, values in enumerate((plain, tuned)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(values))
        digests.append(config_files.load(path)[0].digest())
    assert digests[0] == digests[1]


TABLES = ("table1", "table2", "table3_cifar100", "table3_domainnet", "table4_cifar100", "table4_domainnet")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_pfedbayespt_has_the_grids_that_the_paper_tuned(name: str) -> None:
    path = f"configs/papers/pfedbayespt/{name}.yaml"
    entries = entries_of(read_section(config_files.read(path)["tune"]), "pfedbayespt")
    depths = [*range(1, 13)]
    assert (entries["method.depth"], entries["method.instance_depth"]) == (depths, depths)
    assert entries["train.lrs.encoder.*"] == [0.0001, 0.0005, 0.001, 0.005, 0.01]
    others = entries_of(read_section(config_files.read(path)["tune"]), "pfedpg")
    if not name.startswith("table4"):  # these compare pFedBayesPT with itself
        assert "method.depth" not in others
        assert others["method.server_lr"] == [0.0001, 0.001, 0.01]


@pytest.mark.parametrize("rounds", [1, 2, 3, 8, 9, 10, 30, 100])
@pytest.mark.parametrize("trials", [1, 2, 5, 20])
def test_stages_end_with_all_rounds_and_each_has_a_third_of_the_trials(rounds: int, trials: int) -> None:
    ends, each = stops(rounds), counts(trials, rounds)
    assert ends[-1] == rounds
    assert ends == sorted(set(ends))
    assert len(ends) == len(each)
    assert each[0] == trials
    assert all(after == -(-before // 3) for before, after in pairwise(each))
    assert rounds <= planned_rounds(trials, rounds) <= trials * rounds


def test_twenty_trials_of_thirty_rounds_cost_less_than_a_third_of_all() -> None:
    assert (stops(30), counts(20, 30)) == ([4, 10, 30], [20, 7, 3])
    assert planned_rounds(20, 30) == 20 * 4 + 7 * 6 + 3 * 20
