"""`engine.compile: step`: whole training steps through torch.compile give the numbers of steps that are not compiled."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from support import assert_near, experiment, local_tensors, run, shared_tensors
from torch import Tensor
from torch._dynamo.utils import counters

import fedprompt.client.local_training as local_training
from fedprompt.client.recorded_step import RecordedSteps, compiler

pytestmark = pytest.mark.unit

SHARED = {
    "data": {"train_per_cell": 2, "test_per_cell": 1},
    "partition": {"scheme": "dirichlet", "alpha": 100.0, "clients": 3, "min_train": 3},
    "train": {"batch_size": 4, "epochs": 2},
    "federation": {"rounds": 2},
}


def compare(method: str, settings: Any, backbone: str = "tiny") -> None:
    asked = {**SHARED, "method": {"name": method}, "backbone": {"name": backbone}}
    plain = run(settings(name="plain", **asked))
    torch._dynamo.reset()
    counters.clear()
    compiled = run(settings(name="compiled", engine={"compile": "step"}, **asked))
    assert counters["stats"]["unique_graphs"] > 0
    assert_near(shared_tensors(plain), shared_tensors(compiled))
    for client in range(3):
        assert_near(local_tensors(plain, client), local_tensors(compiled, client))
    losses = [[record.loss for record in each.rounds()[1:]] for each in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("method", ["head_tune", "fedvpt_deep", "pfedbayespt"])
def test_the_graph_of_a_whole_step_gives_the_same_numbers(
    method: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph as torch.compile takes it, without machine code."""
    monkeypatch.setattr(local_training, "compiler", lambda: compiler("eager"))
    compare(method, settings)


@pytest.mark.parametrize("method", ["promptfl", "pfedmoap", "pfeddc", "fedmaple"])
def test_so_does_the_graph_of_a_step_with_texts(method: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "compiler", lambda: compiler("eager"))
    compare(method, settings, "tiny-clip")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is none")
def test_compiled_steps_give_the_same_numbers(settings: Any) -> None:
    compare("fedvpt_deep", settings)


def test_a_step_that_cannot_be_compiled_runs_as_it_is_and_says_so_once() -> None:
    def broken(graph: torch.fx.GraphModule) -> Any:
        raise RuntimeError("no compiler")

    def twice(tensors: Any) -> list[Tensor]:
        return [tensors[0] * 2]

    steps, inputs = RecordedSteps(broken), [torch.ones(3)]
    steps.run(("key",), twice, inputs)
    with pytest.warns(UserWarning, match=r"engine\.compile has no effect"):
        steps.run(("key",), twice, inputs)
    for _ in range(2):  # played, and not compiled again
        (found,) = steps.run(("key",), twice, inputs)
        assert torch.equal(found, torch.full((3,), 2.0))


def test_one_client_at_a_time_is_compiled_too(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "compiler", lambda: compiler("eager"))
    torch._dynamo.reset()
    counters.clear()
    experiment(settings(method={"name": "fedvpt"}, engine={"compile": "step", "cohort": 1}, **SHARED)).run().close()
    assert counters["stats"]["unique_graphs"] > 0
