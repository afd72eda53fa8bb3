"""Every method after its run: a client that is opened again predicts what its evaluation counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_method import CASES
from support import run

from fedprompt.core import registry
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.subset import Selection
from fedprompt.inference.adapt import adapt
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.metrics.scoring import score

pytestmark = pytest.mark.matrix

LOOKS_AGAIN = {
    "fedtpg",
    "flow",
    "ifca",
    "per_fedavg",
    "pfedprompt",
    "promptfl_ft",
    "fedvpt+fedbabu",
}  # cases in which a client that trained looks at its training images before it predicts


@pytest.fixture
def opened(settings: Any) -> Callable[..., LoadedRun]:
    """A federation of a few images after two rounds, half of the clients in each."""

    def make(case: str, **federation: Any) -> LoadedRun:
        values = settings(
            data={"train_per_cell": 2, "test_per_cell": 1, "classes": ["disc", "square", "cross"]},
            train={"momentum": 0.0},
            federation={"rounds": 2, "fraction": 0.5, **federation},
        )
        return LoadedRun.open(run(values, CASES[case]), method=CASES[case])

    return make


def assert_reproduced(client: TrainedClient) -> None:
    """The figures of its test images are those in the run file: counts exactly, sums to rounding."""
    opened = client.opened
    source = open_source(opened.config.data, opened.factory.cache)
    test = opened.run.manifest().clients[client.index].test
    draws = client.predict([source.image(int(index)) for index in test]).draws
    found = score(draws, torch.from_numpy(source.labels[test]), source.domains[test], source.domain_names).to_json()
    stored = opened.run.evaluations(opened.round)[client.index]
    assert (found["samples"], found["correct"]) == (stored["samples"], stored["correct"])
    for name in ("nll", "entropy", "mutual_information"):
        assert found[name] == pytest.approx(stored[name], rel=1e-4, abs=1e-5), name


@pytest.mark.sampled
@pytest.mark.parametrize("case", list(CASES))
def test_a_client_predicts_what_its_evaluation_counted(case: str, opened: Callable[..., LoadedRun]) -> None:
    federation = opened(case)
    clients = federation.run.evaluations(2)
    assert len(clients) == 4
    for client in clients:
        assert_reproduced(TrainedClient.open(federation, client))


@pytest.mark.sampled
@pytest.mark.parametrize("case", list(CASES))
def test_labelled_images_make_a_newcomer_what_a_held_out_client_was(
    case: str, opened: Callable[..., LoadedRun]
) -> None:
    federation = opened(case, held_out=0.5, newcomer_epochs=2)
    source = open_source(federation.config.data, federation.factory.cache)
    clients = federation.run.evaluations(2)
    assert set(clients) == federation.world.newcomers
    for client in clients:
        own = federation.run.manifest().clients[client].train
        assert_reproduced(adapt(federation, Selection(source, own, source.class_names), client))


@pytest.mark.sampled
@pytest.mark.parametrize("case", sorted(registry.methods()))
def test_a_new_client_is_no_client_of_the_run(case: str, opened: Callable[..., LoadedRun]) -> None:
    """It comes behind all others, gets what held-out clients get, and its probabilities are some."""
    federation = opened(case)
    source = open_source(federation.config.data, federation.factory.cache)
    client = adapt(federation, Selection(source, np.arange(0, len(source), 9), source.class_names), epochs=1)
    assert (client.index, client.name, client.world.newcomers) == (4, "newcomer", {4})
    found = client.probabilities([source.image(0), source.image(1)])
    assert found.shape == (2, 3)
    torch.testing.assert_close(found.sum(1), torch.ones(2, dtype=torch.float64))


@pytest.mark.sampled
@pytest.mark.parametrize("case", list(CASES))
def test_training_images_are_opened_only_for_methods_that_look_at_them_again(
    case: str, opened: Callable[..., LoadedRun]
) -> None:
    federation = opened(case, fraction=1.0)
    bank = federation.bank()
    federation.fitted(0, bank, federation.states())
    assert bank.used == (case in LOOKS_AGAIN)
