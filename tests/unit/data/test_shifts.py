"""A domain that nobody trains on, a long tail, and another set at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import run

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.split import long_tail
from fedprompt.data.sources import open as sources
from fedprompt.data.sources.open import open_both
from fedprompt.data.sources.synthetic import DOMAINS, TinySource
from fedprompt.errors import ConfigError, DataError
from fedprompt.evaluation.leak_audit import open_audit
from fedprompt.inference.uncertainty import answers

pytestmark = pytest.mark.unit


def manifest_of(partition: dict[str, Any], **data: Any) -> Any:
    return make_manifest(TinySource(), DataConfig(source="tiny", **data), PartitionConfig(**partition), seed=0)


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize(
    "partition",
    [
        {"scheme": "domains", "clients": 3},
        {"scheme": "dirichlet", "clients": 4, "alpha": 1.0},
        {"scheme": "dirichlet_in_domains", "clients": 6, "alpha": 1.0},
    ],
    ids=lambda each: each["scheme"],
)
def test_no_client_trains_on_the_unseen_domain_and_all_are_tested_on_it(name: str, partition: dict[str, Any]) -> None:
    source = TinySource()
    unseen = DOMAINS.index(name)
    made = manifest_of(partition, unseen_domain=name)
    train = made.clients.train.values
    assert set(source.domains[train]) == set(range(4)) - {unseen}
    assert len(train) == 3 * 5 * 12  # all that the other domains have
    wanted = np.flatnonzero((source.splits == "test") & (source.domains == unseen))
    for client in range(partition["clients"]):
        assert np.array_equal(made.clients.test[client], wanted)
    made.check(source)


def test_each_client_holds_one_of_the_other_domains() -> None:
    source = TinySource()
    made = manifest_of({"scheme": "domains", "clients": 3}, unseen_domain=DOMAINS[1])
    assert [set(source.domains[made.clients.train[k]].tolist()) for k in range(3)] == [{0}, {2}, {3}]


@pytest.mark.parametrize("name", ["sketchy", "outlin"])
def test_an_unknown_domain_is_refused_with_the_nearest_one(name: str) -> None:
    with pytest.raises(DataError, match=r"data\.unseen_domain must be one of several domains"):
        manifest_of({"scheme": "domains", "clients": 3}, unseen_domain=name)


@pytest.mark.parametrize("imbalance", [1, 4, 12])
def test_a_long_tail_falls_geometrically(imbalance: float) -> None:
    labels = np.arange(5).repeat(48)
    kept = np.bincount(labels[long_tail(np.arange(240), labels, imbalance)])
    assert kept.tolist() == [int(48 * imbalance ** (-c / 4) + 1e-9) for c in range(5)]
    assert kept[0] == 48
    assert kept[-1] == 48 // imbalance


def test_a_long_tail_is_taken_from_every_domain_and_leaves_tests_alone() -> None:
    source = TinySource()
    made = manifest_of({"scheme": "dirichlet", "clients": 2, "alpha": 9.0}, imbalance=4)
    train, test = made.clients.train.values, made.clients.test.values
    cells = np.bincount(source.domains[train] * 5 + source.labels[train], minlength=20).reshape(4, 5)
    assert cells.sum(0).tolist() == [48, 33, 24, 16, 12]
    assert np.ptp(cells, axis=0).max() <= 1
    assert len(test) == 120


def test_a_long_tail_keeps_every_class() -> None:
    labels = np.array([0] * 10 + [1] * 2 + [2] * 3)
    assert np.bincount(labels[long_tail(np.arange(15), labels, 1e6)]).tolist() == [10, 1, 1]


@pytest.mark.parametrize(
    "setting", [{"unseen_domain": DOMAINS[1]}, {"imbalance": 4.0}], ids=lambda each: next(iter(each))
)
def test_a_manifest_of_other_images_is_not_taken_for_a_shift(tmp_path: Path, setting: dict[str, Any]) -> None:
    usual, shifted = (
        {"scheme": "manifest", "manifest": str(tmp_path / f"{name}.json")} for name in ("usual", "shifted")
    )
    manifest_of({"scheme": "iid", "clients": 3}).save(Path(usual["manifest"]))
    made = manifest_of({"scheme": "iid", "clients": 3}, **setting)
    made.save(Path(shifted["manifest"]))
    with pytest.raises(ConfigError, match=rf"data\.{next(iter(setting))} must be absent with a partition.manifest"):
        manifest_of(usual, **setting)
    assert manifest_of(shifted, **setting).checksum == made.checksum
    assert manifest_of(shifted).checksum == made.checksum


def test_another_set_holds_the_same_kind(tmp_path: Path) -> None:
    _, other = open_both(DataConfig(source="tiny", other_set="tiny"), tmp_path)
    assert other is not None
    with pytest.raises(DataError, match=r"data\.other_set must hold images"):
        open_both(DataConfig(source="tiny", other_set="tiny-text"), tmp_path)


def test_two_tests_of_names_are_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match=r"must be absent where data\.novel"):
        DataConfig(source="tiny", novel=0.4, other_set="tiny")


def test_simulated_nodes_are_not_tested_on_another_set(settings: Any) -> None:
    pytest.importorskip("ray")
    names = {"data": {"source": "tiny", "other_set": "tiny"}, "backbone": {"name": "tiny-clip"}, "method": "promptfl"}
    with pytest.raises(ConfigError, match=r"data\.other_set must be absent with engine\.kind: flower-simulation"):
        run(settings(engine={"kind": "flower-simulation"}, **names))


def test_another_set_that_is_not_there_is_called_by_its_own_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.other_set: data\.source must be .* got 'nowhere'"):
        open_both(DataConfig(source="tiny", other_set="nowhere"), tmp_path)


def test_a_set_without_domains_has_none_to_leave_out() -> None:
    source = TinySource()
    source.domains, source.domain_names = np.zeros(len(source), dtype=np.int64), ("all",)
    with pytest.raises(DataError, match=r"data\.unseen_domain must be absent for a set without several domains"):
        make_manifest(source, DataConfig(source="tiny", unseen_domain="all"), PartitionConfig(scheme="iid"), seed=0)


def test_a_run_file_does_not_say_which_other_set_is_opened(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a stranger may name any path or hub id there; whoever measures with its model never needs it."""
    names = {"data": {"source": "tiny", "other_set": "groceries"}, "backbone": {"name": "tiny-clip"}}
    opened: list[str] = []
    monkeypatch.setattr(sources, "open_whole", lambda config, cache: opened.append(config.source) or TinySource())
    done = run(settings(method="promptfl", federation={"rounds": 1}, **names))
    assert "groceries" in opened
    opened.clear()
    answers(done)
    open_audit(done)
    assert set(opened) == {"tiny"}
