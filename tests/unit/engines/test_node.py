"""The far side of the post: a node answers whatever it gets, refuses what is not for it, and says nothing about its images."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from one_site import NAMES, NOISE, Ground, reply, told

from fedprompt import __version__
from fedprompt.client.factory import ExperimentFactory
from fedprompt.config import EngineConfig, OutputConfig
from fedprompt.core.messages import LocalUpdate
from fedprompt.engines.remote.node import SimulatedNode, Site
from fedprompt.engines.remote.protocol import Answer
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import DataError, StorageError
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


def test_a_site_trains_on_its_own_images(ground: Ground, tmp_path: Path) -> None:
    """And sends what the same client of the partition would send."""
    expected = reply(SimulatedNode(), ground.order({"output": ground.settings["output"]}))
    found = reply(ground.site(tmp_path), ground.order())
    assert (found.client, found.round, found.samples) == (1, 1, 10)
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    assert torch.allclose(found.upload["prompt"], expected.upload["prompt"], atol=1e-5)


def test_a_site_introduces_itself(ground: Ground, tmp_path: Path) -> None:
    met = Answer.from_bytes(ground.site(tmp_path).answer(ground.order(kind="meet").to_bytes())).meeting
    assert met is not None
    assert (met.name, met.class_names, met.backbone) == ("client_1", ground.world.class_names, ground.setting.backbone)
    assert told(SimulatedNode(), ground.order(kind="meet"))[0] == "order"


def test_a_site_needs_nothing_that_only_the_server_uses(ground: Ground, tmp_path: Path) -> None:
    """Neither its rule of aggregation nor how its own images were opened and divided."""
    theirs = {
        "aggregation": {**ground.config["aggregation"], "rule": "theirs", "options": {"step": 0.5}},
        "partition": {**ground.config["partition"], "scheme": "theirs"},
        "data": {**ground.config["data"], "format": "theirs", "options": {"names": ["a"]}},
    }
    assert reply(ground.site(tmp_path), ground.order(theirs)).samples == 10
    rule, text = told(SimulatedNode(), ground.order({**theirs, "output": ground.settings["output"]}))
    assert (rule, "aggregation.rule must be one of" in text) == ("config", True)


# -- whatever comes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return [SimulatedNode(), ground.site(tmp_path_factory.mktemp("site"))]


@given(blob=st.binary(max_size=200))
def test_junk_is_answered(nodes: list[Any], blob: bytes) -> None:
    for node in nodes:
        failure = Answer.from_bytes(node.answer(blob)).failure
        assert failure is not None
        assert failure[0] == "order"


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab/.\0", max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab/.", max_size=5), inner, max_size=2),
    max_leaves=5,
)
SECTIONS = [
    "name",
    "seed",
    "data",
    "backbone",
    "method",
    "variant",
    "train",
    "federation",
    "guard",
    "privacy",
    "engine",
    "output",
    "x",
]


@given(
    changes=st.dictionaries(st.sampled_from(SECTIONS), JUNK, min_size=1, max_size=2),
    kind=st.sampled_from(["meet", "survey"]),
)
def test_settings_of_any_kind_are_answered(
    ground: Ground, nodes: list[Any], changes: dict[str, Any], kind: Any
) -> None:
    blob = ground.order(changes, kind=kind, train=None).to_bytes()
    for node in nodes:
        Answer.from_bytes(node.answer(blob))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"received": {}}, None),
        ({"received": {"prompt": torch.zeros(3)}}, None),
        ({"received": {"head.weight": torch.zeros(1)}}, None),
        ({"keep_as": None}, "state"),
        ({"state": 77}, "state"),
        ({"kind": "survey", "train": None}, None),
        ({"client": 2**61}, None),
        ({"evaluate": 2**61, "train": 2**61}, None),
    ],
    ids=["nothing", "shape", "local", "no number", "unknown state", "survey", "nobody", "far away"],
)
def test_an_order_that_cannot_be_done_is_answered(
    ground: Ground, tmp_path: Path, changes: Any, rule: str | None
) -> None:
    answer = Answer.from_bytes(ground.site(tmp_path).answer(ground.order(**changes).to_bytes()))
    if rule is not None:
        assert answer.failure is not None
        assert answer.failure[0] == rule


def test_nan_from_the_server_is_found_before_anything_is_sent(ground: Ground, tmp_path: Path) -> None:
    received = {"prompt": ground.world.roles.shared["prompt"] * torch.nan}
    rule, text = told(ground.site(tmp_path), ground.order(received=received))
    assert (rule, "finite" in text) == ("finite", True)
    assert not list(tmp_path.rglob("*.safetensors"))


# -- what is told of errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        DataError("image must be readable: secret-patient.png"),
        StorageError("cannot write '/home/secret-patient'"),
        ValueError("cannot parse secret-patient"),
        OSError("secret-patient"),
        KeyError("secret-patient"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_may_speak_of_images_is_told_without_its_text(
    ground: Ground,
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raising(*arguments: Any) -> None:
        raise error

    site = ground.site(tmp_path)
    monkeypatch.setattr(Site, "_source", raising)
    for kind in ("meet", "work"):
        blob = site.answer(ground.order(kind=kind).to_bytes())
        assert b"secret" not in blob
        failure = Answer.from_bytes(blob).failure
        assert failure is not None
        assert failure[1] == f"{type(error).__name__}: see the log of the node"
    assert "secret-patient" in capsys.readouterr().err


def test_a_site_without_images_does_not_say_where_it_looked(ground: Ground, tmp_path: Path) -> None:
    site = Site("client_1", str(tmp_path / "hidden"), tmp_path / "state")
    blob = site.answer(ground.order(kind="meet").to_bytes())
    assert b"hidden" not in blob
    assert Answer.from_bytes(blob).failure == ("node", "DataError: see the log of the node")
    with pytest.raises(DataError, match="--data"):
        site.check_images()


def test_a_disk_that_is_in_the_way_is_told_without_its_path(ground: Ground, tmp_path: Path) -> None:
    site = ground.site(tmp_path)
    (tmp_path / "client_1").mkdir()
    (tmp_path / "client_1" / "states").write_text("a file where a folder should be")
    blob = site.answer(ground.order().to_bytes())
    assert str(tmp_path).encode() not in blob
    assert Answer.from_bytes(blob).reply(10**7) is None


def test_what_is_wrong_with_settings_is_told(ground: Ground, tmp_path: Path) -> None:
    rule, text = told(ground.site(tmp_path), ground.order({"method": {"name": "nonsense"}}))
    assert (rule, "method.name must be one of" in text) == ("config", True)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_another_backbone_is_refused(ground: Ground, tmp_path: Path) -> None:
    order = ground.order()
    order = replace(order, setting=replace(order.setting, backbone="f" * 64))
    rule, text = told(ground.site(tmp_path), order)
    assert rule == "backbone"
    assert text.startswith(
        f"weights of the backbone must be the server's (ffffffffffff...), got {ground.setting.backbone[:12]}"
    )


def test_another_version_of_fedprompt_is_refused(ground: Ground, tmp_path: Path) -> None:
    order = ground.order()
    order = replace(order, setting=replace(order.setting, version="0.0.1"))
    rule, text = told(ground.site(tmp_path), order)
    assert (rule, text) == ("version", f"fedprompt must be 0.0.1 as on the server, got {__version__}")


@pytest.mark.parametrize("classes", [("cat", "dog"), (), None])
def test_classes_it_does_not_have_are_refused(ground: Ground, tmp_path: Path, classes: Any) -> None:
    order = ground.order()
    rule, _ = told(ground.site(tmp_path), replace(order, setting=replace(order.setting, class_names=classes)))
    assert rule in ("classes", "config")


def test_a_site_may_lack_classes_of_the_federation(ground: Ground, tmp_path: Path) -> None:
    more = (*ground.world.class_names, "unicorn")
    order = ground.order()
    assert reply(ground.site(tmp_path), replace(order, setting=replace(order.setting, class_names=more))).samples == 10


@pytest.mark.parametrize("changes", [{"client": 0}, {"client": 4}, {"names": None}, {"names": ("client_1", "x")}])
def test_an_order_for_somebody_else_is_refused(ground: Ground, tmp_path: Path, changes: dict[str, Any]) -> None:
    names = changes.pop("names", NAMES)
    order = ground.order(**changes)
    rule, text = told(ground.site(tmp_path), replace(order, setting=replace(order.setting, client_names=names)))
    assert rule == "name"
    assert "order must be for 'client_1'" in text
    assert not list(tmp_path.rglob("states"))


# -- the server's settings and the site's own -------------------------------------------------------------------------


def test_paths_of_the_server_mean_nothing_to_a_site(ground: Ground, tmp_path: Path) -> None:
    """Neither where it writes nor what it reads; nor can it be told to attack."""
    elsewhere = tmp_path / "elsewhere"
    config = {
        "output": {"directory": str(elsewhere), "cache": str(elsewhere / "cache"), "threads": 1},
        "engine": {"kind": "flower", "disk_gib": 0.0, "cohort": 3},
        "data": {**ground.config["data"], "source": str(elsewhere / "images"), "format": "folder"},
        "partition": {"scheme": "manifest", "manifest": str(elsewhere / "manifest.json")},
        "attack": {"kind": "nan", "fraction": 0.9},
    }
    expected = reply(ground.site(tmp_path / "one"), ground.order())
    found = reply(ground.site(tmp_path / "two"), ground.order(config))
    assert torch.equal(found.upload["prompt"], expected.upload["prompt"])
    assert not elsewhere.exists()
    factory = ground.site(tmp_path / "three")._factory(ground.order(config).setting)
    assert (factory.config.output, factory.config.engine) == (OutputConfig(), EngineConfig())
    assert elsewhere not in factory.cache.parents, "weights are looked for where this machine keeps them"


def test_everything_a_site_writes_is_in_its_folder(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)
    reply(ground.site(tmp_path / "own"), ground.order())
    assert not os.listdir(workplace)
    assert (tmp_path / "own" / "client_1" / "states" / ("a" * 32) / "1" / "5.safetensors").is_file()


def test_the_backbone_is_loaded_once_for_many_runs(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[ExperimentFactory] = []
    load: Callable[[ExperimentFactory], Any] = ExperimentFactory.backbone

    def counted(factory: ExperimentFactory) -> Any:
        loaded.append(factory)
        return load(factory)

    monkeypatch.setattr(ExperimentFactory, "backbone", counted)
    site = ground.site(tmp_path)
    for run in ("b" * 32, "c" * 32):
        order = ground.order()
        reply(site, replace(order, setting=replace(order.setting, run=run)))
        site.answer(replace(order, kind="meet").to_bytes())
    assert len(loaded) == 1
    assert len(list((tmp_path / "client_1" / "states").iterdir())) == 2


# -- privacy ----------------------------------------------------------------------------------------------------------


def noise_of(ground: Ground, found: LocalUpdate) -> Tensors:
    return {name: found.upload[name] - tensor for name, tensor in ground.world.roles.shared.items()}


def test_the_noise_of_a_site_is_its_secret_and_as_strong_as_agreed(ground: Ground, tmp_path: Path) -> None:
    """Two sites with the same images give two answers to one order; the deviation is noise times bound."""
    order = ground.order({"privacy": NOISE})
    found = [noise_of(ground, reply(ground.site(tmp_path / name), order))["prompt"] for name in ("one", "two")]
    assert not torch.allclose(found[0], found[1], atol=1e-4)
    for update in found:
        assert float(update.std()) == pytest.approx(1e-3, rel=0.1)
        assert float(update.mean()) == pytest.approx(0, abs=2e-4)
    repeatable = reply(SimulatedNode(), ground.order({"privacy": NOISE, "output": ground.settings["output"]}))
    again = reply(SimulatedNode(), ground.order({"privacy": NOISE, "output": ground.settings["output"]}))
    assert torch.equal(repeatable.upload["prompt"], again.upload["prompt"]), "where it is simulated it is repeatable"
    assert not any(torch.allclose(update, noise_of(ground, repeatable)["prompt"], atol=1e-4) for update in found)


def test_a_private_answer_tells_neither_loss_nor_number_of_images(ground: Ground, tmp_path: Path) -> None:
    found = reply(ground.site(tmp_path), ground.order({"privacy": NOISE}))
    assert (found.samples, found.loss) == (1, None)


def test_a_private_round_is_answered_once(ground: Ground, tmp_path: Path) -> None:
    """The same order again, also after a restart, brings the same bytes; another one for that round brings nothing."""
    order = ground.order({"privacy": NOISE})
    first = reply(ground.site(tmp_path), order)
    again = reply(ground.site(tmp_path), replace(order, keep_as=6))
    assert torch.equal(first.upload["prompt"], again.upload["prompt"])
    moved = {"prompt": ground.world.roles.shared["prompt"] + 1}
    assert told(ground.site(tmp_path), replace(order, received=moved, keep_as=7))[0] == "state"


def test_no_round_is_answered_that_the_run_does_not_have(ground: Ground, tmp_path: Path) -> None:
    site, rounds = ground.site(tmp_path), ground.config["federation"]["rounds"]
    for asked in ({"train": rounds + 1}, {"train": 0}, {"train": None, "evaluate": rounds + 1}):
        rule, text = told(site, ground.order(**asked))
        assert (rule, f"round must be one of the run's 1 to {rounds}" in text) == ("round", True)
    assert reply(site, ground.order(train=rounds)).round == rounds


def test_a_site_can_insist_on_noise(ground: Ground, tmp_path: Path) -> None:
    site = ground.site(tmp_path, least_noise=1.0, policy=SitePolicy(evaluate="none"))
    for privacy in (None, {"noise": 0.9, "clip": 1.0}, {"noise": 5.0, "clip": 1.0, "noise_at": "server"}):
        rule, text = told(site, ground.order({"privacy": privacy}))
        assert (rule, "noise of at least 1 here" in text) == ("privacy", True)
    assert reply(site, ground.order({"privacy": NOISE})).samples == 1
