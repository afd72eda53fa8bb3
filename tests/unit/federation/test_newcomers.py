"""Clients that are held out: they take no part in anything but the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hard_users import HARD_USERS
from support import (
    StopAfter,
    Stopped,
    content,
    experiment,
    local_tensors,
    run,
    server_tensors,
    shared_tensors,
    worst_difference,
)

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.core.client_sampling import sample_newcomers
from fedprompt.core.messages import LocalUpdate
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.engines import kinds
from fedprompt.engines.in_process import InProcess
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def held_out(settings: Any) -> Make:
    """Four clients, two of them held out."""

    def make(name: str = "tiny", **changes: Any) -> dict[str, Any]:
        federation = {"rounds": 2, "held_out": 0.5, **changes.pop("federation", {})}
        return settings(name=name, federation=federation, **changes)

    return make


@pytest.fixture
def newcomers() -> set[int]:
    return set(sample_newcomers(0, 4, 0.5))


class Watched(InProcess):
    """Notes who was asked for what."""

    asked: list[tuple[str, int]]

    def _noting(self, what: str, clients: Sequence[int]) -> None:
        self.asked.extend((what, client) for client in clients)

    def survey(self, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[LocalUpdate]:
        self._noting("survey", clients)
        return super().survey(clients, download)

    def train(self, round: int, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[LocalUpdate]:
        self._noting("train", clients)
        return super().train(round, clients, download)

    def evaluate(
        self, round: int, clients: Sequence[int], download: Callable[[int], Tensors], ahead: Any = None
    ) -> Any:
        self._noting("evaluate", clients)
        return super().evaluate(round, clients, download, ahead)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    Watched.asked = []
    monkeypatch.setattr(kinds, "InProcess", Watched)
    return Watched.asked


@pytest.mark.parametrize(
    ("clients", "share", "count"),
    [(4, 0.5, 2), (5, 0.5, 3), (10, 0.24, 2), (10, 0.25, 3), (100, 0.001, 1), (3, 0.99, 2), (2, 0.99, 1)],
)
def test_the_asked_share_is_held_out_but_at_least_one_and_never_all(clients: int, share: float, count: int) -> None:
    chosen = sample_newcomers(0, clients, share)
    assert len(chosen) == count
    assert chosen <= set(range(clients))


def test_nobody_is_held_out_unless_asked_for() -> None:
    assert sample_newcomers(0, 4, 0.0) == frozenset()
    assert sample_newcomers(0, 1, 0.0) == frozenset()


def test_the_only_client_cannot_be_held_out(held_out: Make) -> None:
    with pytest.raises(ConfigError, match=r"federation\.held_out must be 0 where there is only one client, got 0\.5"):
        run(held_out(partition={"scheme": "iid", "clients": 1}))


def test_the_seed_decides_who_is_held_out() -> None:
    chosen = [sample_newcomers(seed, 6, 0.5) for seed in range(20)]
    assert len(set(chosen)) > 5
    assert set().union(*chosen) == set(range(6))
    assert chosen[3] == sample_newcomers(3, 6, 0.5)


def test_held_out_clients_are_neither_surveyed_nor_trained_and_only_they_are_evaluated(
    held_out: Make, asked: list[tuple[str, int]], newcomers: set[int]
) -> None:
    done = run(held_out(), HARD_USERS["statistics"])
    others = set(range(4)) - newcomers
    by_task = {task: {client for name, client in asked if name == task} for task in ("survey", "train", "evaluate")}
    assert by_task == {"survey": others, "train": others, "evaluate": newcomers}
    assert {client for record in done.rounds() for client in record.cohort} == others
    assert all(set(done.reader.evaluations(entry["round"])) == newcomers for entry in done.history())


def test_nothing_of_a_held_out_client_is_kept(held_out: Make, newcomers: set[int]) -> None:
    done = run(held_out())
    assert {client for client, _, _ in done.reader.client_states()} == set(range(4)) - newcomers


def test_the_fraction_is_one_of_those_who_take_part(held_out: Make) -> None:
    done = run(held_out(federation={"fraction": 0.5, "rounds": 3}))
    assert [len(record.cohort) for record in done.rounds()] == [0, 1, 1, 1]


def test_a_head_is_fitted_on_a_copy_that_is_thrown_away(held_out: Make) -> None:
    gently = {"train": {"lr": 0.02, "batch_size": 8, "momentum": 0.0}, "method": {"name": "fedvpt", "head": "shared"}}
    fitted = run(held_out("fitted", federation={"newcomer_epochs": 5}, **gently))
    plain = run(held_out("plain", federation={"newcomer_epochs": 0}, **gently))
    assert worst_difference(shared_tensors(fitted), shared_tensors(plain)) == 0.0
    assert fitted.summary()["nll"] < plain.summary()["nll"] - 1e-3


def test_only_the_head_is_fitted(held_out: Make) -> None:
    still = {"train": {"lr": 0.05, "lrs": {"head.*": 0.0}, "batch_size": 8}, "method": {"name": "fedvpt_deep"}}
    fitted = run(held_out("fitted", federation={"newcomer_epochs": 5}, **still))
    plain = run(held_out("plain", federation={"newcomer_epochs": 0}, **still))
    assert fitted.reader.evaluations(2) == plain.reader.evaluations(2)


def runtime(values: dict[str, Any], **world_changes: Any) -> ClientRuntime:
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    pixels = ImageStore(source, backbone.shape.image_size, made.config.data.resize, made.factory.cache)
    bank = ImageBank(source, manifest, pixels, backbone)
    states = ClientStates(lambda client: None)
    return ClientRuntime(made.config, replace(world, **world_changes), made.method, bank, states, source.domain_names)


@pytest.mark.parametrize("head", ["local", "shared"])
def test_without_epochs_a_newcomer_is_evaluated_like_any_client_that_never_took_part(
    held_out: Make, newcomers: set[int], head: str
) -> None:
    values = held_out(method={"name": "fedvpt", "head": head}, federation={"newcomer_epochs": 0})
    done = run(values)
    plain = runtime(values, newcomers=frozenset())
    for client in newcomers:
        assert plain.evaluate(2, client, shared_tensors(done)).to_json() == done.reader.evaluations(2)[client]


def test_the_fitted_head_is_that_of_plain_gradient_descent_on_the_features(held_out: Make, newcomers: set[int]) -> None:
    """Batches of all images leave nothing to chance, so that a few lines can repeat it."""
    rate, epochs = 0.1, 4
    values = held_out(
        method={"name": "head_tune", "head": "local"},
        train={"lr": rate, "momentum": 0.0, "batch_size": 1000},
        federation={"newcomer_epochs": epochs},
    )
    done = run(values)
    bank = runtime(values).bank
    for client in newcomers:
        train, test = bank.images(client, "train"), bank.images(client, "test")
        everything = torch.arange(len(train))
        features = train.features("cls", everything)
        weight = torch.zeros(5, features.shape[1], requires_grad=True)
        bias = torch.zeros(5, requires_grad=True)
        for _ in range(epochs):
            loss = F.cross_entropy(F.linear(features, weight, bias), train.labels)
            for tensor, grad in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
                tensor.data -= rate * grad
        logits = F.linear(test.features("cls", torch.arange(len(test))), weight, bias)
        expected = F.cross_entropy(logits, test.labels, reduction="sum").item()
        assert done.reader.evaluations(2)[client]["nll"] == pytest.approx(expected, rel=1e-5)


def test_an_interrupted_run_ends_as_an_undisturbed_one(held_out: Make) -> None:
    with pytest.raises(Stopped):
        run(held_out("broken"), observer=StopAfter(1))
    assert content(run(held_out("broken"), resume=True)) == content(run(held_out("whole")))


def test_a_newcomer_of_ditto_starts_from_what_it_received(held_out: Make) -> None:
    """It never trained a personal copy; with batches of all images the shared part is the inner method."""
    same = {
        "method": {"name": "fedvpt", "prompt_tokens": 2, "head": "shared"},
        "train": {"lr": 0.05, "momentum": 0.0, "batch_size": 1000, "epochs": 3},
    }
    ditto = run(held_out("ditto", variant={"name": "ditto"}, **same))
    inner = run(held_out("inner", **same))
    assert ditto.summary()["nll"] == pytest.approx(inner.summary()["nll"], rel=1e-4)


def test_scaffold_counts_only_those_who_take_part(held_out: Make, newcomers: set[int]) -> None:
    """From zero, one round in which all take part makes the server's control the mean of the clients'."""
    values = held_out(variant={"name": "scaffold"}, train={"momentum": 0.0}, federation={"rounds": 1})
    done = run(values)
    owns = [local_tensors(done, client)["scaffold.own.prompt"] for client in set(range(4)) - newcomers]
    torch.testing.assert_close(server_tensors(done)["scaffold.control.prompt"], torch.stack(owns).mean(0))
