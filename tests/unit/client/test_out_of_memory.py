"""Memory that runs out with several clients in a batch: halves of them give the same, and the run file says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import experiment, run, shared_tensors

import fedprompt.client.local_evaluation as local_evaluation
import fedprompt.client.local_training as local_training
import fedprompt.client.recorded_step as recorded_step
from fedprompt.client.out_of_memory import is_out_of_memory
from fedprompt.core.method import Method
from fedprompt.federation.observer import Observer
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit
CLIENTS = 8


def runs_out(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, most: int, error: Exception) -> list[int]:
    """Let a function of many clients fail above a number of them, in its second step; the sizes of all calls."""
    real: Callable[..., Any] = getattr(module, name)
    sizes: list[int] = []

    def limited(method: Method, world: Any, params: Any, *others: Any) -> Any:
        sizes.append(len(next(iter(params.stacked.values()))))
        if sizes[-1] > most and len(sizes) > 1:
            raise error
        return real(method, world, params, *others)

    monkeypatch.setattr(module, name, limited)
    return sizes


def settings_of(settings: Any, name: str, **changes: Any) -> dict[str, Any]:
    many = {"partition": {"scheme": "iid", "clients": CLIENTS}, "data": {"train_per_cell": 8}, "train": {"epochs": 2}}
    made: dict[str, Any] = settings(name=name, engine={"cohort": CLIENTS}, **many, **changes)
    return made


class Progress(Observer):
    """The shares that were shown, and warnings."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.warnings: list[str] = []

    def stepped(self, doing: str, clients: int, share: float) -> None:
        self.shares.append(share)

    def warned(self, round: int, sentence: str) -> None:
        self.warnings.append(sentence)


def close(one: Run, other: Run) -> None:
    found, wanted = shared_tensors(one), shared_tensors(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError()], ids=["device", "machine"])
@pytest.mark.parametrize(
    "method", [{"name": "fedvpt", "prompt_tokens": 2}, {"name": "pfedbayespt", "prompt_tokens": 2}]
)
def test_training_goes_on_with_half_of_the_clients(
    settings: Any, monkeypatch: pytest.MonkeyPatch, method: Any, error: Exception
) -> None:
    plain = run(settings_of(settings, "plain", method=method))
    sizes = runs_out(monkeypatch, local_training, "losses_of_clients", 3, error)
    shown = Progress()
    halved = experiment(settings_of(settings, "halved", method=method)).run(observer=shown)
    close(halved, plain)
    assert sizes[:3] == [8, 8, 4]
    assert max(sizes[sizes.index(2) :]) == 2, "later batches are as small"
    events = [detail for _, _, kind, detail in halved.reader.events() if kind == "warning" and "memory" in detail]
    assert events == [
        "memory: out of memory with 8 clients in one batch: from here on at most 4",
        "memory: out of memory with 4 clients in one batch: from here on at most 2",
    ]
    assert [text.partition(" with")[0] for text in shown.warnings] == ["out of memory"] * 2
    assert max(shown.shares, default=1.0) <= 1.0


@pytest.mark.parametrize("when", ["recorded", "played"])
def test_steps_that_are_recorded_go_on_with_half_of_the_clients(
    settings: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Clients of different sizes: batches change from step to step, and clients fall off."""
    uneven = {"partition": {"scheme": "dirichlet", "clients": CLIENTS, "alpha": 1.0}, "data": {}}
    steps = {"method": "head_tune", "train": {"epochs": 4, "batch_size": 4}, **uneven}
    plain = run({**settings_of(settings, "plain"), **steps})
    failed: list[int] = []

    def limited(real: Callable[..., Any], *given: Any) -> Any:
        clients = len(given[-1][0])
        if clients > 3:
            failed.append(clients)
            raise torch.OutOfMemoryError("no room")
        return real(*given)

    if when == "recorded":
        monkeypatch.setattr(recorded_step, "noted", partial(limited, recorded_step.noted))
    else:
        played = recorded_step.Program.__call__
        monkeypatch.setattr(recorded_step.Program, "__call__", lambda *given: limited(played, *given))
    halved = run({**settings_of(settings, "halved"), **steps})
    close(halved, plain)
    assert failed
    assert failed == sorted(failed, reverse=True)


def test_testing_goes_on_with_half_of_the_clients(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(settings_of(settings, "plain"))
    sizes = runs_out(monkeypatch, local_evaluation, "forward_of_clients", 4, torch.OutOfMemoryError("no room"))
    halved = run(settings_of(settings, "halved"))
    close(halved, plain)
    assert max(sizes[2:]) == 4
    for round in (1, 2):
        found, wanted = halved.evaluations(round), plain.evaluations(round)
        assert {client: each["correct"] for client, each in found.items()} == {
            client: each["correct"] for client, each in wanted.items()
        }


def test_one_client_that_does_not_fit_ends_the_run(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(local_training, "losses_of_clients", full)
    monkeypatch.setattr(local_training, "step_loss", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run(settings_of(settings, "none"))


def test_other_errors_are_not_taken_for_it(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    sizes = runs_out(monkeypatch, local_training, "losses_of_clients", 3, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(settings_of(settings, "broken"))
    assert sizes == [8, 8]
