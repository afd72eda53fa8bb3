"""What a server that cheats cannot get out of a site: every test is an attack that once worked."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from one_site import NOISE, Ground, reply, told
from remote_run import exported, tiny_settings

from fedprompt.backbones.weight_cache import identity
from fedprompt.config import FederationConfig
from fedprompt.core.client_sampling import absences
from fedprompt.engines.remote.node import Site
from fedprompt.engines.remote.protocol import Answer, Order
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import ConfigError, ContractError, DataError, RunError
from fedprompt.experiment import Experiment
from fedprompt.privacy import mechanism

pytestmark = pytest.mark.unit

HUGE = {"lr": 1e30, "batch_size": 4, "momentum": 0.0}  # after its first step nothing is finite any more


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


def answer(site: Site, order: Order) -> Answer:
    return Answer.from_bytes(site.answer(order.to_bytes()))


def evaluation(ground: Ground, round: int, prompt: torch.Tensor | None = None, **config: Any) -> Order:
    received = ground.world.roles.shared if prompt is None else {"prompt": prompt}
    return ground.order(config, evaluate=round, train=None, keep_as=None, received=received)


def with_run(order: Order, run: str) -> Order:
    return replace(order, setting=replace(order.setting, run=run))


def images_without_split(ground: Ground, folder: Path) -> Path:
    """The images of the site as files in folders of classes: nobody has said which of them test."""
    table = pq.read_table(ground.files["client_1"])
    names = json.loads(table.schema.metadata[b"fedprompt"])["classes"]
    for place, (image, label) in enumerate(
        zip(table.column("image").to_pylist(), table.column("label").to_pylist(), strict=True)
    ):
        for copy in range(2):  # enough of each class for a choice
            file = folder / names[label] / f"{place}-{copy}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(image)
    return folder


# -- evaluation as an oracle ------------------------------------------------------------------------------------------


def test_which_images_test_is_the_sites_own_choice(ground: Ground, tmp_path: Path) -> None:
    """The server may ask for another split as often as it likes, in new runs too: it reaches the same few images."""
    images = images_without_split(ground, tmp_path / "images")
    reached, chosen = set(), set()
    data = {name: value for name, value in ground.config["data"].items() if name != "test_per_cell"}
    wishes: Sequence[dict[str, Any]] = [
        {},
        {"split_seed": 1},
        {"split_seed": 2, "test_per_cell": 1},
        {"split_seed": 3, "test_fraction": 0.9},
        {"per_domain": 7},
    ]
    for number, wish in enumerate(wishes):
        site = Site("client_1", str(images), tmp_path / "state")  # also after a restart
        order = with_run(evaluation(ground, 1, data={**data, **wish}), f"{number:032x}")
        assert answer(site, order).result is not None
        assert site._made is not None
        test = site._made[0].bank.images(1, "test").indices
        chosen.add(tuple(test.tolist()))
        reached |= set(test.tolist())
    assert len(chosen) == 1
    assert len(reached) == pytest.approx(0.2 * 30, abs=1)


def test_no_order_opens_another_set_at_a_site(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may be a path or a hub id: the answer told which files there are, and the hub was asked from inside."""
    asked: list[str] = []

    def refuse(name: str, *rest: object) -> None:
        asked.append(name)
        raise OSError("no network in tests")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    for place in ("hub:stranger/set", str(ground.files["client_2"]), "/no/such/place"):
        data = {**ground.config["data"], "other_set": place}
        site = ground.site(tmp_path / place.strip("/").replace("/", "_"))
        assert reply(site, ground.order({"data": data})).client == 1
    assert asked == []


def test_sites_with_the_same_images_choose_differently(ground: Ground, tmp_path: Path) -> None:
    """What is not known cannot be aimed at."""
    images = images_without_split(ground, tmp_path / "images")
    found = set()
    for number in range(6):
        site = Site("client_1", str(images), tmp_path / f"state-{number}")
        answer(site, evaluation(ground, 1))
        assert site._made is not None
        found.add(tuple(site._made[0].bank.images(1, "test").indices.tolist()))
    assert len(found) > 1


def test_the_order_of_classes_does_not_choose_the_test_images(ground: Ground, tmp_path: Path) -> None:
    """Every run may list the classes anew: with another split for every order, each image would be tested some day."""
    images = images_without_split(ground, tmp_path / "images")
    names, found = ground.world.class_names, set()
    for number, order in enumerate([names, names[::-1], (*names[1:], names[0]), ("aardvark", *names)]):
        site = Site("client_1", str(images), tmp_path / "state")
        asked = with_run(evaluation(ground, 1), f"{number:032x}")
        answer(site, replace(asked, setting=replace(asked.setting, class_names=order)))
        assert site._made is not None
        bank = site._made[0].bank
        found.add(tuple(tuple(bank.images(1, part).indices.tolist()) for part in ("train", "test")))
    assert len(found) == 1


def test_a_round_is_evaluated_once(ground: Ground, tmp_path: Path) -> None:
    """The same question again has the same answer, also after a restart; other parameters have none."""
    prompt = ground.world.roles.shared["prompt"]
    first = answer(ground.site(tmp_path), evaluation(ground, 1)).result
    assert first is not None
    assert answer(ground.site(tmp_path), evaluation(ground, 1)).result == first
    for asked in (prompt + 1, prompt + 2):
        rule, text = told(ground.site(tmp_path), evaluation(ground, 1, asked))
        assert (rule, "round 1" in text) == ("evaluation", True)


def test_an_evaluation_that_fails_is_the_answer_of_its_round(ground: Ground, tmp_path: Path) -> None:
    """Whether predictions are finite depends on images: asked as often as the server likes, it finds their features."""
    prompt = ground.world.roles.shared["prompt"]
    assert told(ground.site(tmp_path), evaluation(ground, 1, torch.full_like(prompt, 3e38)))[0] == "finite"
    for asked in (torch.full_like(prompt, 3e38), torch.full_like(prompt, 2e38), prompt):
        rule, text = told(ground.site(tmp_path), evaluation(ground, 1, asked))
        assert (rule, "round 1" in text) == ("evaluation", True)
    assert answer(ground.site(tmp_path), evaluation(ground, 2)).result is not None


def test_an_evaluation_with_noise_does_not_say_that_it_failed(ground: Ground, tmp_path: Path) -> None:
    """Also where updates are not noised: no epsilon covers that an evaluation fails."""
    site = ground.site(tmp_path, policy=SitePolicy(evaluate="noised"))
    prompt = torch.full_like(ground.world.roles.shared["prompt"], 3e38)
    shared = {"method": {"name": "fedvpt", "prompt_tokens": 60, "head": "shared"}}
    order = evaluation(ground, 1, **shared)
    head = Experiment({**ground.settings, **shared}).factory
    roles = head.world(head.backbone(), ground.world.class_names, ground.world.client_names).roles
    found = answer(site, replace(order, received={**roles.shared, "prompt": prompt}))
    assert found.failure is None
    assert found.result is not None


def test_rounds_are_evaluated_in_their_order(ground: Ground, tmp_path: Path) -> None:
    site, prompt = ground.site(tmp_path), ground.world.roles.shared["prompt"]
    assert answer(site, evaluation(ground, 2)).result is not None
    assert told(site, evaluation(ground, 1, prompt + 1))[0] == "evaluation"
    other = ground.site(tmp_path / "other")
    reply(other, ground.order(train=2))
    assert told(other, evaluation(ground, 1))[0] == "evaluation", "its model is not the one that was trained on since"


def test_training_goes_on_where_its_evaluation_is_refused(ground: Ground, tmp_path: Path) -> None:
    site, prompt = ground.site(tmp_path), ground.world.roles.shared["prompt"]
    assert answer(site, evaluation(ground, 1, prompt + 1)).result is not None
    both = answer(site, ground.order(train=2, evaluate=1))
    assert both.result is None
    assert both.withheld is not None
    assert both.withheld[0] == "evaluation"
    assert both.reply(10**7) is not None


# -- refusals as an oracle --------------------------------------------------------------------------------------------


def test_a_private_round_that_diverges_looks_like_any_other(ground: Ground, tmp_path: Path) -> None:
    """A noised zero of the same length, noted in the ledger: the same again has the same answer."""
    plain = ground.site(tmp_path / "plain").answer(ground.order({"privacy": NOISE}).to_bytes())
    order = ground.order({"privacy": NOISE, "train": HUGE})
    blob = ground.site(tmp_path / "huge").answer(order.to_bytes())
    assert Answer.from_bytes(blob).failure is None
    assert len(blob) == len(plain)
    found = reply(ground.site(tmp_path / "huge"), replace(order, keep_as=6))
    assert torch.equal(found.upload["prompt"], Answer.from_bytes(blob).reply(10**7).upload["prompt"])  # type: ignore[union-attr]
    noise = found.upload["prompt"] - ground.world.roles.shared["prompt"]
    assert float(noise.std()) == pytest.approx(NOISE["clip"] * NOISE["noise"], rel=0.1)
    moved = {"prompt": ground.world.roles.shared["prompt"] + 1}
    assert told(ground.site(tmp_path / "huge"), replace(order, received=moved, keep_as=7))[0] == "state"
    again = replace(order, train=2, state=6, committed=6, keep_as=8)
    assert reply(ground.site(tmp_path / "huge"), again).round == 2, "it goes on from what it kept before"


def test_what_goes_wrong_with_images_in_a_private_round_looks_like_any_other(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedprompt.client.local_training import LocalTraining

    def failing(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("index 3 is out of bounds for an image that is like this")

    monkeypatch.setattr(LocalTraining, "run", failing)
    assert reply(ground.site(tmp_path), ground.order({"privacy": NOISE})).samples == 1
    assert told(ground.site(tmp_path / "open"), ground.order())[0] == "error", (
        "a run without privacy says that it failed"
    )


@pytest.mark.parametrize("kind", [ContractError, ConfigError, RunError, DataError], ids=lambda kind: kind.__name__)
def test_no_error_after_an_image_was_used_is_told(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Also those of fedprompt itself: when a method raises one may depend on images."""
    from fedprompt.client.local_training import LocalTraining

    def failing(*arguments: Any, **more: Any) -> Any:
        raise kind("update must be bounded to 1 before it is noised, got 12345.678")

    monkeypatch.setattr(LocalTraining, "run", failing)
    blob = ground.site(tmp_path).answer(ground.order({"privacy": NOISE}).to_bytes())
    assert Answer.from_bytes(blob).failure is None
    assert b"12345" not in blob


@pytest.mark.parametrize(
    "change",
    [{"prompt": torch.zeros(1, 1)}, {"prompt": torch.zeros(0)}, "double"],
    ids=["small", "empty", "dtype"],
)
@pytest.mark.parametrize("config", [{}, {"privacy": NOISE}], ids=["plain", "private"])
def test_a_tensor_that_is_not_as_declared_is_refused_before_an_image_is_used(
    ground: Ground, tmp_path: Path, config: dict[str, Any], change: Any
) -> None:
    """What becomes of it later would depend on images: a broadcast, an error, noise around another centre."""
    site = ground.site(tmp_path)
    received = {"prompt": ground.world.roles.shared["prompt"].double()} if change == "double" else change
    for order in (ground.order(config, received=received), replace(evaluation(ground, 1, **config), received=received)):
        rule, text = told(site, order)
        assert (rule, "tensor 'prompt' must be" in text) == ("order", True)
    assert site.spent.runs() == {}, "nothing is spent on it"


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({}, torch.tensor(1.0)),
        ({"privacy": NOISE}, torch.tensor(1e6)),
        ({"privacy": {**NOISE, "noise_at": "server"}}, torch.tensor(1e6)),
        ({"privacy": {**NOISE, "noise_at": "server", "quantile": 0.5}}, torch.tensor(0.0)),
        ({"privacy": {**NOISE, "noise_at": "server", "quantile": 0.5}}, torch.ones(2)),
    ],
    ids=["plain", "noise at the client", "fixed", "zero", "two"],
)
def test_a_bound_that_was_not_agreed_is_refused(
    ground: Ground, tmp_path: Path, config: dict[str, Any], bound: torch.Tensor
) -> None:
    site = ground.site(tmp_path)
    received = {**ground.world.roles.shared, mechanism.CLIP: bound}
    assert told(site, ground.order(config, received=received))[0] == "privacy"
    assert site.spent.runs() == {}


def test_without_privacy_a_divergence_is_still_told(ground: Ground, tmp_path: Path) -> None:
    assert told(ground.site(tmp_path), ground.order({"train": HUGE}))[0] == "finite"


# -- another run under the same name ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": {"rounds": 500}},
        {"privacy": None},
        {"privacy": {**NOISE, "noise": 0.5}},
        {"privacy": {**NOISE, "clip": 1e6}},
        {"seed": 1},
        {"method": {"name": "fedvpt", "prompt_tokens": 60, "head": "shared"}},
        {"train": {"lr": 0.05, "batch_size": 1, "momentum": 0.0}},
        {"data": {"source": "tiny", "train_per_cell": 1, "test_per_cell": 1}},
    ],
    ids=["rounds", "no privacy", "noise", "clip", "seed", "method", "train", "data"],
)
def test_a_run_keeps_the_settings_it_began_with(ground: Ground, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whoever changes them under the same number is refused, before and after a restart."""
    site = ground.site(tmp_path)
    reply(site, ground.order({"privacy": NOISE}))
    for node in (site, ground.site(tmp_path)):
        order = ground.order({"privacy": NOISE, **changes}, keep_as=9)
        for asked in (order, replace(order, train=2), replace(order, train=None, evaluate=1)):
            rule, text = told(node, asked)
            assert rule == "settings", text
    assert reply(ground.site(tmp_path), ground.order({"privacy": NOISE}, train=2)).round == 2


def test_a_run_keeps_the_sites_and_classes_it_began_with(ground: Ground, tmp_path: Path) -> None:
    """Another place among other names would be another ledger."""
    reply(ground.site(tmp_path), ground.order({"privacy": NOISE}))
    order = ground.order({"privacy": NOISE}, keep_as=9)
    for change, client in (
        ({"client_names": ("client_1", "client_0", "client_2", "client_3")}, 0),
        ({"client_names": ("x", "y", "z", "client_1")}, 3),
        ({"class_names": (*ground.world.class_names, "unicorn")}, 1),
    ):
        other = replace(order, setting=replace(order.setting, **change), client=client)
        assert told(ground.site(tmp_path), other)[0] == "settings"


def test_a_name_that_is_given_twice_is_refused(ground: Ground, tmp_path: Path) -> None:
    """One site under fifty numbers would answer fifty times, with fresh noise each."""
    site, order = ground.site(tmp_path), ground.order({"privacy": NOISE})
    many = replace(order.setting, client_names=("client_1",) * 50)
    for client in (0, 1, 49):
        rule, text = told(site, replace(order, setting=many, client=client))
        assert (rule, "once" in text) == ("name", True)


def test_an_order_that_fails_does_not_pay_for_others(ground: Ground, tmp_path: Path) -> None:
    """The last round first, in a way that cannot be done: once it was counted, all rounds before it were free."""
    run = {"privacy": NOISE, "federation": {"rounds": 3}}
    site = ground.site(tmp_path)
    assert told(site, ground.order(run, train=3, keep_as=None))[0] == "state"
    for round in (1, 2, 3):
        reply(site, ground.order(run, train=round, keep_as=10 + round))
    assert site.spent.runs()[ground.setting.run].releases == 3


def test_a_server_that_comes_back_says_the_same_in_other_words(ground: Ground, tmp_path: Path) -> None:
    """Defaults that are spelled out, and the order of keys, are no other settings."""
    reply(ground.site(tmp_path), ground.order())
    turned = dict(reversed(ground.config.items()))
    turned["federation"] = {"rounds": ground.config["federation"]["rounds"]}
    order = ground.order(train=2)
    assert reply(ground.site(tmp_path), replace(order, setting=replace(order.setting, config=turned))).round == 2


# -- figures after fitting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "client"),
    [
        ({"federation": {"rounds": 2, "evaluate_at": "after_local"}}, 1),
        ({"method": {"name": "fedvpt", "prompt_tokens": 60, "head": "shared_then_finetune"}}, 1),
        ({"variant": {"name": "fedbabu"}}, 1),
        ({"federation": {"rounds": 2, "held_out": 0.9}}, 1),
        ({"method": {"name": "fedvpt", "prompt_tokens": 60, "head": "local"}}, 1),
        (
            {
                "method": {"name": "fedvpt", "prompt_tokens": 60, "head": "local"},
                "federation": {"rounds": 2, "evaluate_at": "global", "never_picked": "fit"},
            },
            1,
        ),
        ({"federation": {"rounds": 2, "evaluate_at": "global", "test_classes": "own"}}, 1),  # of its training images
    ],
    ids=["after local", "head", "variant", "held out", "local head", "never picked", "own classes"],
)
def test_who_insists_on_noise_fits_nothing_for_an_evaluation(
    ground: Ground, tmp_path: Path, changes: dict[str, Any], client: int
) -> None:
    """What is fitted to training images must not leave as exact figures, by whichever way it is fitted."""
    site = ground.site(tmp_path, least_noise=1.0)
    config = {**ground.settings, "privacy": NOISE, **changes}
    experiment = Experiment(config)
    shared = experiment.factory.world(
        experiment.factory.backbone(), ground.world.class_names, ground.world.client_names
    ).roles.shared
    order = ground.order({"privacy": NOISE, **changes}, evaluate=1, train=None, keep_as=None, received=shared)
    found = answer(site, order)
    assert found.result is None
    assert found.failure is not None
    assert found.failure[0] == "privacy", found.failure


def test_who_insists_on_noise_is_tested_without_training_images(ground: Ground, tmp_path: Path) -> None:
    """pFedPrompt predicts with the features of training images: exact counts would show them through any noise on updates."""
    config = {"method": {"name": "pfedprompt"}, "backbone": {"name": "tiny-clip"}, "privacy": NOISE}
    factory = Experiment({**ground.settings, **config}).factory
    backbone = factory.backbone()
    roles = factory.world(backbone, ground.world.class_names, ground.world.client_names).roles
    order = ground.order(config, evaluate=1, train=None, keep_as=None, received=roles.shared)
    order = replace(order, setting=replace(order.setting, backbone=identity(backbone)))
    rule, text = told(ground.site(tmp_path, least_noise=1.0), order)
    assert (rule, "training images" in text) == ("privacy", True), text
    assert answer(ground.site(tmp_path / "open"), order).result is not None


def test_sums_over_two_sets_of_training_images_do_not_differ_by_one_image(tmp_path: Path) -> None:
    """The server asks twice, for 5 and for 6 images of each class: the difference was one image's feature."""
    whole = {**tiny_settings(tmp_path / "runs", "whole"), "data": {"source": "tiny"}}
    ground, files = Ground(tmp_path / "ground"), exported(whole, tmp_path / "whole")
    site = Site("client_1", str(files["client_1"]), tmp_path / "state")
    sums = []
    for run, images in (("a" * 32, 5), ("b" * 32, 6)):
        config = {
            "method": {"name": "pep_fedpt", "minimum_count": 5},
            "data": {"source": "tiny", "train_per_cell": images},
        }
        factory = Experiment({**ground.settings, **config}).factory
        roles = factory.world(factory.backbone(), ground.world.class_names, ground.world.client_names).roles
        received = {**roles.shared, **{f"sent.{name}": roles.server[name] for name in ("prototypes", "known")}}
        order = with_run(ground.order(config, train=None, keep_as=None, received=received), run)
        found = answer(site, replace(order, kind="survey")).reply(10**7)
        assert found is not None
        sums.append(found.upload["start.sums"])
    assert sums[0].abs().sum() > 0
    assert torch.equal(sums[0], sums[1])


# -- numbers without end ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(30)
def test_many_rounds_are_counted_without_going_through_them() -> None:
    begin = time.process_time()
    away = {"a": (1, 10**12), "b": (2, 10**12)}
    settings = FederationConfig.model_construct(rounds=10**12, away=away)
    found = absences(settings, ["a", "b", "c"], ())
    assert found == {0: range(1, 10**12 + 1), 1: range(2, 10**12 + 1)}
    with pytest.raises(
        ConfigError, match=r"federation\.away must leave a client to train in every round, got 'none in 2'"
    ):
        absences(settings, ["a", "b"], ())
    assert time.process_time() - begin < 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "changes",
    [
        {"federation": {"rounds": 10**12}},
        {"train": {"epochs": 10**12}},
        {"train": {"batch_size": 10**12}},
        {"federation": {"rounds": 2, "newcomer_epochs": 10**12}},
        {"method": {"name": "fedvpt", "prompt_tokens": 10**12}},
        {"privacy": {"target_epsilon": 1.0}, "federation": {"rounds": 900_000}},
        {"seed": 10**400},
    ],
    ids=["rounds", "epochs", "batch", "newcomer epochs", "tokens", "search for noise", "seed"],
)
def test_numbers_without_end_are_refused_at_once(ground: Ground, tmp_path: Path, changes: dict[str, Any]) -> None:
    begin = time.process_time()
    for order in (ground.order(changes), ground.order(changes, kind="meet")):
        Answer.from_bytes(ground.site(tmp_path).answer(order.to_bytes()))
    assert told(ground.site(tmp_path), ground.order(changes))[0] in ("order", "config", "policy")
    assert time.process_time() - begin < 20


def test_a_run_with_too_many_names_is_refused(ground: Ground, tmp_path: Path) -> None:
    order = ground.order()
    names = tuple(map(str, np.arange(2 * 10**5)))
    assert told(ground.site(tmp_path), replace(order, setting=replace(order.setting, client_names=names)))[0] == "order"
