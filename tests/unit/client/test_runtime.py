"""Local training, piece by piece."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import local_tensors, run, shared_tensors

from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Client, Progress, World
from fedprompt.errors import BackboneError, ContractError, DivergenceError
from fedprompt.federation.loop import is_evaluated
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("clients", "fraction", "count"), [(10, 0.25, 3), (10, 0.05, 1), (3, 0.01, 1), (100, 0.05, 5), (4, 1.0, 4)]
)
def test_a_cohort_has_the_asked_share_and_at_least_one_client(clients: int, fraction: float, count: int) -> None:
    cohort = sample_cohort(0, 1, range(clients), fraction)
    assert len(cohort) == len(set(cohort)) == count
    assert all(0 <= client < clients for client in cohort)


def test_cohorts_change_from_round_to_round_and_reach_everybody() -> None:
    cohorts = [sample_cohort(0, round, range(10), 0.3) for round in range(1, 31)]
    assert len({tuple(cohort) for cohort in cohorts}) > 20
    assert {client for cohort in cohorts for client in cohort} == set(range(10))


def test_evaluation_happens_every_k_rounds_and_in_the_last_n(settings: Any) -> None:
    done = run(
        settings(federation={"rounds": 9, "evaluate_every": 4, "evaluate_last": 2}, method={"name": "head_tune"})
    )
    assert [entry["round"] for entry in done.history()] == [4, 8, 9]
    assert is_evaluated(5, done.config.federation.model_copy(update={"rounds": 5, "evaluate_last": 0}))


def test_the_point_of_evaluation_matters(settings: Any) -> None:
    found = {}
    for point in ("personalised", "global", "after_local"):
        federation = {"rounds": 2, "evaluate_at": point}
        found[point] = run(
            settings(name=point, federation=federation, train={"lr": 0.05, "momentum": 0.0, "epochs": 5})
        ).summary()
    chance = math.log(5)
    assert found["global"]["nll"] == pytest.approx(chance, abs=1e-6), "a client without its own head knows nothing"
    assert found["personalised"]["nll"] < chance - 0.01
    assert found["after_local"]["nll"] != found["personalised"]["nll"]


def test_evaluation_after_local_training_keeps_nothing_of_it(settings: Any) -> None:
    plain, after = (
        run(settings(name=point, federation={"rounds": 2, "evaluate_at": point}))
        for point in ("personalised", "after_local")
    )
    assert torch.equal(shared_tensors(plain)["prompt"], shared_tensors(after)["prompt"])
    assert torch.equal(local_tensors(plain, 1)["head.weight"], local_tensors(after, 1)["head.weight"])


def test_divergence_is_told_with_client_and_round_and_keeps_the_rounds_before(settings: Any) -> None:
    growing = {"lr": 10.0, "weight_decay": 1.0, "momentum": 0.0}  # every step multiplies the prompts by -9
    values = settings(train=growing, federation={"rounds": 50, "evaluate_every": 50, "evaluate_last": 1})
    with pytest.raises(DivergenceError, match="must be finite"):
        run(values)
    kept = Run(f"{values['output']['directory']}/tiny-fedvpt-seed0")
    assert len(kept.rounds()) > 5
    assert all(torch.isfinite(tensor).all() for tensor in shared_tensors(kept).values())


def test_a_private_head_that_diverges_is_noticed_too(settings: Any) -> None:
    values = settings(method={"name": "head_tune", "head": "local"}, train={"lr": 1e45, "momentum": 0.0})
    with pytest.raises(DivergenceError, match="must be finite"):
        run(values)


@dataclass(frozen=True)
class Leaky(FedVPT):
    """Uploads the head it declared local."""

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        return {**upload, **local}, local


def test_a_method_that_uploads_a_local_tensor_is_stopped(settings: Any) -> None:
    with pytest.raises(ContractError, match=r"'head\.bias' has role local and must never go up"):
        run(settings(), Leaky())


@dataclass(frozen=True)
class Meddler(FedVPT):
    """Changes the backbone behind everybody's back."""

    def prompts(self, world: Any, params: Tensors, batch: Any, noise: Tensors) -> Any:
        from support import meddle

        meddle()
        return super().prompts(world, params, batch, noise)


def test_a_backbone_that_changed_is_noticed(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedprompt.client import factory as module

    loaded = []
    original = module.load_backbone
    monkeypatch.setattr(module, "load_backbone", lambda *args: loaded.append(original(*args)) or loaded[-1])
    monkeypatch.setattr("support.meddle", lambda: loaded[-1].weights["norm.bias"].add_(1e-6), raising=False)
    with pytest.raises(BackboneError, match="must stay frozen"):
        run(settings(), Meddler())


def test_no_weight_of_the_backbone_asks_for_a_gradient(settings: Any) -> None:
    from support import experiment

    _, _, backbone, _ = experiment(settings()).factory.prepare()
    assert not any(tensor.requires_grad for tensor in backbone.weights.values())
