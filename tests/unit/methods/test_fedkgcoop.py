"""FedKgCoOp: the distance by hand, its limits, and its pull."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import shared_tensors, worst_difference
from text_methods import gradient, run_on_clip, runtime_of, working_parameters

from fedprompt.core import registry
from fedprompt.errors import ConfigError
from fedprompt.methods.fedkgcoop import FedKgCoOp, distance
from fedprompt.methods.promptfl import PromptFL

pytestmark = pytest.mark.unit


def test_the_distance_by_hand() -> None:
    """Cosines 0.6 and 1: mean of 0.4 and 0; half of the mean squared distance, (0.16 + 0.64) / 2 and 0."""
    anchor = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    assert float(distance(anchor, text)) == pytest.approx(0.2)
    assert float(distance(anchor, text)) == pytest.approx(float((anchor - text).square().sum(-1).mean()) / 2)


def test_a_weight_of_zero_is_promptfl(settings: Any) -> None:
    found = run_on_clip(settings, FedKgCoOp(context_tokens=3, weight=0.0), "knowledge")
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain")
    assert worst_difference(shared_tensors(found), shared_tensors(plain)) == 0
    assert found.client_accuracies() == plain.client_accuracies()


def test_the_gradient_is_promptfls_and_that_of_the_distance(settings: Any) -> None:
    method = FedKgCoOp(context_tokens=3, weight=2.0)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    leaf = params["context"].clone().requires_grad_()
    apart = distance(params["anchor"], world.text.encode(leaf.unsqueeze(0), "end")[0])
    (pull,) = torch.autograd.grad(apart, leaf)
    plain = gradient(runtime, PromptFL(context_tokens=3), params, "context")
    torch.testing.assert_close(gradient(runtime, method, params, "context"), plain + 2 * pull, atol=1e-5, rtol=1e-4)
    assert float(pull.abs().max()) > 1e-4


def test_a_context_that_is_the_words_has_no_distance(settings: Any) -> None:
    method = FedKgCoOp(anchor_words="a photo of a")
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    text = world.text.encode(params["context"].unsqueeze(0), "end")[0]
    assert float(distance(params["anchor"], text)) == pytest.approx(0.0, abs=1e-6)


def test_a_strong_pull_keeps_the_class_features_near_the_words(settings: Any) -> None:
    def apart(weight: float) -> float:
        method = FedKgCoOp(context_tokens=3, weight=weight)
        done = run_on_clip(settings, method, f"by-{int(weight)}", train={"lr": 0.02})
        _, world = runtime_of(settings, method)
        text = world.text.encode(shared_tensors(done)["context"].unsqueeze(0), "end")[0]
        return float(distance(world.text.encode_words(method.anchor_words), text))

    assert apart(100.0) < apart(0.0)


@pytest.mark.parametrize("given", [{"weight": -1.0}, {"anchor_words": ""}])
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        runtime_of(settings, registry.build({"name": "fedkgcoop", **given}))
