"""Clients trained as one batch against clients trained one by one: every method, every variant, the hard users."""

from __future__ import annotations

from typing import Any

import pytest
from every_method import CASES
from support import assert_near, local_tensors, run, server_tensors, shared_tensors

from fedprompt.runs.run import Run

pytestmark = pytest.mark.matrix

PLAIN_STEPS = ("per_fedavg", "fedvpt+scaffold")  # refuse what would change them


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.sampled
def test_a_cohort_as_one_batch_equals_one_client_at_a_time(case: str, settings: Any) -> None:
    """Ragged clients, two epochs, momentum, weight decay, schedules of their own, clipping, noise: all tensors and all figures to 1e-5."""
    method = CASES[case]
    shared = {
        "data": {"train_per_cell": 2, "test_per_cell": 1},
        "partition": {"scheme": "dirichlet", "alpha": 1.0, "clients": 5, "min_train": 3},
        "train": {
            "lr": 0.02,
            "batch_size": 4,
            "epochs": 2,
            "momentum": 0.0 if case in PLAIN_STEPS else 0.9,
            "weight_decay": 0.0 if case in PLAIN_STEPS else 1e-3,
            "schedule": "local_cosine",
            "clip_norm": None if case in PLAIN_STEPS else 5.0,
        },
        "federation": {"rounds": 2, "evaluation_batch": 3},
    }
    alone = run(settings(name="alone", engine={"cohort": 1}, **shared), method)
    for cohort in (3, "auto"):
        assert_equal_runs(alone, run(settings(name=f"by-{cohort}", engine={"cohort": cohort}, **shared), method))


def test_a_cohort_under_adam_with_warm_up_equals_one_client_at_a_time(settings: Any) -> None:
    shared = {
        "data": {"train_per_cell": 2, "test_per_cell": 1},
        "partition": {"scheme": "dirichlet", "alpha": 1.0, "clients": 5, "min_train": 3},
        "train": {
            "lr": 0.01,
            "batch_size": 4,
            "epochs": 2,
            "optimizer": "adamw",
            "weight_decay": 1e-2,
            "schedule": "local_cosine",
            "warmup_epochs": 1,
            "clip_norm": 5.0,
        },
        "federation": {"rounds": 2, "evaluation_batch": 3},
    }
    alone, together = (run(settings(name=f"by-{cohort}", engine={"cohort": cohort}, **shared)) for cohort in (1, 3))
    assert_equal_runs(alone, together)


def assert_equal_runs(first: Run, second: Run) -> None:
    assert_near(shared_tensors(first), shared_tensors(second))
    assert_near(server_tensors(first), server_tensors(second))
    for client in range(5):
        assert_near(local_tensors(first, client), local_tensors(second, client))
    for one, other in zip(first.rounds(), second.rounds(), strict=True):
        assert (one.cohort, one.bytes_up, one.bytes_down) == (other.cohort, other.bytes_up, other.bytes_down)
        assert (one.loss is None) == (other.loss is None)
        if one.loss is not None and other.loss is not None:
            assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5)
        results, others = (each.reader.evaluations(one.round) for each in (first, second))
        assert set(results) == set(others)
        for client, result in results.items():
            assert result["nll"] == pytest.approx(others[client]["nll"], rel=1e-4, abs=1e-4)
            assert result["diagnostics"] == pytest.approx(others[client]["diagnostics"], rel=1e-4, abs=1e-4)
