"""FedProGrad: its two gradients, its limit PromptFL, and what is removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import shared_tensors, worst_difference
from text_methods import gradient, run_on_clip, runtime_of, working_parameters

from fedprompt.core import registry
from fedprompt.core.method import cross_entropy
from fedprompt.errors import ConfigError
from fedprompt.methods.bases.with_text import similarity
from fedprompt.methods.fedprograd import FedProGrad, general_loss
from fedprompt.methods.promptfl import PromptFL

pytestmark = pytest.mark.unit


def test_the_general_loss_by_hand() -> None:
    """Targets (3/4, 1/4) and predictions (1/2, 1/2): log 2. With tau = 2 the logits are halved and the loss times four."""
    before, now = torch.tensor([[1.0986123, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert float(general_loss(before, now, 1.0)) == pytest.approx(0.6931472)
    assert float(general_loss(before, now, 2.0)) == pytest.approx(4 * 0.6931472)
    tilted = torch.tensor([[1.0, 0.0]])
    expected = -(0.75 * torch.tensor([1.0, 0.0]).log_softmax(0)[0] + 0.25 * torch.tensor([1.0, 0.0]).log_softmax(0)[1])
    assert float(general_loss(before, tilted, 1.0)) == pytest.approx(float(expected))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_gradient_is_the_papers(settings: Any, strength: float) -> None:
    method = FedProGrad(context_tokens=3, strength=strength)
    runtime, world = runtime_of(settings, method)
    params, images = working_parameters(runtime), runtime.bank.images(0, "train")
    image, labels = images.features("image", torch.arange(6)), images.labels[:6]
    leaf = params["context"].clone().requires_grad_()
    now = similarity(world, image, world.text.encode(leaf.unsqueeze(0), "end")[0])
    before = similarity(world, image, params["anchor"])
    (own,) = torch.autograd.grad(cross_entropy(now, labels).mean(), leaf, retain_graph=True)
    (general,) = torch.autograd.grad(general_loss(before, now, 1.0).mean(), leaf)
    product = float((own * general).sum())
    expected = own - strength * min(0.0, product) / float(general.square().sum()) * general
    torch.testing.assert_close(gradient(runtime, method, params, "context"), expected, atol=1e-5, rtol=1e-4)


def test_knowledge_changes_the_gradient_only_where_it_opposes(settings: Any) -> None:
    """Known is a sharper form of what the random context says now: labels are against it. Of a flatter form they are not."""
    method, plain = FedProGrad(context_tokens=3), PromptFL(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    alone = gradient(runtime, plain, params, "context")
    now = world.text.encode(params["context"].unsqueeze(0), "end")[0]
    changes = []
    for sharpness in (4.0, 0.0):
        found = gradient(runtime, method, {**params, "anchor": sharpness * now}, "context")
        changes.append(float((found - alone).abs().max()))
    assert changes[0] > 1e-3
    assert changes[1] < 1e-5


def test_a_strength_of_zero_is_promptfl(settings: Any) -> None:
    found = run_on_clip(settings, FedProGrad(context_tokens=3, strength=0.0), "projected")
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain")
    assert worst_difference(shared_tensors(found), shared_tensors(plain)) < 1e-6
    assert found.client_accuracies() == plain.client_accuracies()


@pytest.mark.parametrize("given", [{"strength": -1.0}, {"temperature": 0.0}, {"anchor_words": ""}])
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        runtime_of(settings, registry.build({"name": "fedprograd", **given}))
