"""Configs of pFedBayesPT's tables have the seeds, the evaluated rounds and the grids of the paper, and its peers their official blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import seeded

from fedprompt.config import Config, config_files
from fedprompt.core import registry
from fedprompt.core.method import World
from fedprompt.core.search_space import Choice, SearchSpace
from fedprompt.methods.sgpt import SGPT
from fedprompt.papers import paper_configs
from fedprompt.tuning.space import read_section, search_space

pytestmark = pytest.mark.unit

PEERS = ("table1", "table2", "table3_domainnet", "table3_cifar100")
OWN = ("table4_domainnet", "table4_cifar100", "figure1_domainnet", "figure1_cifar100")
DEPTHS = Choice(tuple(range(1, 13)))
ENCODER = Choice((0.0001, 0.0005, 0.001, 0.005, 0.01))
WORLD = World(40, 12, 17, 4, ("a", "b"), ("one", "two"))  # as many blocks as the paper's backbone


def configs(table: str) -> list[Config]:
    return config_files.load(paper_configs.find(f"pfedbayespt/{table}").path)


def of_method(table: str, name: str) -> list[dict[str, Any]]:
    """The settings of a method in a table, each once."""
    found = [registry.completed(each).method for each in configs(table) if each.method["name"] == name]
    return [each for place, each in enumerate(found) if each not in found[:place]]


def space_of(table: str, name: str) -> SearchSpace:
    """What a study of this table tries for a method."""
    section = read_section(config_files.read(paper_configs.find(f"pfedbayespt/{table}").path)["tune"])
    config = next(each for each in map(registry.completed, configs(table)) if each.method["name"] == name)
    method = registry.build(config.method)
    return search_space(config, method, replace(WORLD, roles=method.init(WORLD, seeded())), section)


@pytest.mark.parametrize("table", [*PEERS, *OWN])
def test_every_table_has_three_seeds_and_the_mean_of_the_last_ten_rounds(table: str) -> None:
    found = configs(table)
    assert {each.seed for each in found} == {0, 1, 2}
    assert {each.federation.last_rounds for each in found} == {10}


@pytest.mark.parametrize("table", ["table1", "table3_domainnet"])
def test_sgpt_has_the_blocks_of_its_official_code_for_office_and_domainnet(table: str) -> None:
    (sgpt,) = of_method(table, "sgpt")
    assert list(sgpt["shared_blocks"]) == [0, 1, 2, 3, 4]
    assert list(sgpt["group_blocks"]) == [5, 6]


@pytest.mark.parametrize("table", ["table2", "table3_cifar100"])
def test_sgpt_has_the_blocks_of_its_official_code_for_cifar(table: str) -> None:
    sgpt = registry.build(of_method(table, "sgpt")[0])
    assert isinstance(sgpt, SGPT)
    assert sgpt.blocks_of_shared(WORLD) == (0, 1, 2, 3)
    assert sgpt.blocks_of_groups(WORLD) == (4, 5, 6)


@pytest.mark.parametrize("table", PEERS)
def test_fedpr_is_there_with_shallow_and_with_deep_prompts(table: str) -> None:
    assert [each["depth"] for each in of_method(table, "fedpr")] == [None, 1]


@pytest.mark.parametrize("table", [*PEERS, *OWN])
def test_the_depths_and_the_encoders_rates_of_the_paper_are_tried(table: str) -> None:
    space = space_of(table, "pfedbayespt")
    assert (space["method.depth"], space["method.instance_depth"]) == (DEPTHS, DEPTHS)
    assert space["train.lrs.encoder.*"] == ENCODER


@pytest.mark.parametrize("table", PEERS)
def test_the_grids_of_pfedpg_are_tried_for_it_alone(table: str) -> None:
    space = space_of(table, "pfedpg")
    assert space["method.server_lr"] == Choice((0.0001, 0.001, 0.01))
    assert space["method.descriptor_std"] == Choice((1.0, 10.0))
    assert "method.depth" not in space
    assert not [setting for setting in space_of(table, "fedvpt_deep") if setting.startswith("method.")]
