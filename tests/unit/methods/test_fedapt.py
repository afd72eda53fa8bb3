"""FedAPT: keys in training and in prediction, the query, and its limit PromptFL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import server_tensors, shared_tensors
from text_methods import gradient, noise_like, run_on_clip, runtime_of, working_parameters

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import cross_entropy
from fedprompt.errors import ConfigError
from fedprompt.methods.fedapt import FedAPT, standardised
from fedprompt.methods.promptfl import PromptFL

pytestmark = pytest.mark.unit


def test_scores_are_standardised_over_domains_by_hand() -> None:
    """(1, 2, 3): mean 2, unbiased deviation 1. Equal scores, and a single one, become zero."""
    torch.testing.assert_close(standardised(torch.tensor([[1.0, 2.0, 3.0]])), torch.tensor([[-1.0, 0.0, 1.0]]))
    assert torch.equal(standardised(torch.full((2, 3), 4.0)), torch.zeros(2, 3))
    assert torch.equal(standardised(torch.tensor([[5.0]])), torch.zeros(1, 1))


def test_training_uses_the_key_of_the_client_and_teaches_the_query_its_number(settings: Any) -> None:
    method = FedAPT(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    for client in (0, 2):
        params, images = working_parameters(runtime, client), runtime.bank.images(client, "train")
        positions = torch.arange(5)
        batch = make_batch(method, images, positions, training=True)
        seen = forward(method, world, params, images, positions, batch, {})
        logits = method.logits(world, params, seen, batch, {})
        scaled = params["context"] * (1 + world.roles.server["keys"][client])
        text = world.text.encode(scaled.unsqueeze(0), "end")[0]
        expected = world.text.scale * images.features("image", positions) @ text.T
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        domains = images.features("image_raw", positions) @ params["query"].T
        total = cross_entropy(logits, batch.labels).mean() + cross_entropy(domains, torch.full((5,), client)).mean()
        torch.testing.assert_close(method.loss(world, params, logits, seen, batch, {}), total, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("class_specific", [False, True])
def test_a_prediction_weighs_the_keys_image_by_image(settings: Any, class_specific: bool) -> None:
    method = FedAPT(context_tokens=2, temperature=0.5, class_specific=class_specific)
    runtime, world = runtime_of(settings, method)
    params, images, positions = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(3)
    params["query"] = params["query"] + noise_like(params["query"], 2, 1.0)
    batch = make_batch(method, images, positions, training=False)
    seen = forward(method, world, params, images, positions, batch, {})
    found = method.logits(world, params, seen, batch, {})
    weights = method.weights(params, images.features("image_raw", positions))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    assert float((weights[0] - weights[1]).abs().max()) > 1e-3
    for row, image in enumerate(images.features("image", positions)):
        key = sum(weights[row, domain] * world.roles.server["keys"][domain] for domain in range(4))
        text = world.text.encode((params["context"] * (1 + key)).unsqueeze(0), "end")[0]
        torch.testing.assert_close(found[row], world.text.scale * text @ image, atol=1e-4, rtol=1e-4)


def test_without_keys_the_context_is_promptfls_with_equal_weights(settings: Any) -> None:
    even = {"federation": {"rounds": 2, "weighting": "uniform"}}
    found = run_on_clip(settings, FedAPT(context_tokens=3, key_size=0.0), "keyless", **even)
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain", **even)
    assert float((shared_tensors(found)["context"] - shared_tensors(plain)["context"]).abs().max()) < 1e-6
    assert found.client_accuracies() == plain.client_accuracies()


def test_both_are_averaged_and_keys_stay_as_they_were(settings: Any) -> None:
    method = FedAPT(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    for name in ("context", "query"):
        assert float(gradient(runtime, method, params, name).abs().max()) > 0
    done = run_on_clip(settings, method, "keys")
    assert set(shared_tensors(done)) == {"context", "query"}
    assert torch.equal(server_tensors(done)["keys"], world.roles.server["keys"])
    assert not world.roles.local


def test_the_query_learns_which_client_an_image_is_of(settings: Any) -> None:
    """With images of one client in the batch, a step of its domain loss raises the weight of its key."""
    method = FedAPT(context_tokens=3)
    runtime, _ = runtime_of(settings, method)
    params = working_parameters(runtime, 1)
    step = gradient(runtime, method, params, "query", 1)
    image = runtime.bank.images(1, "train").features("image_raw", torch.arange(6))
    before = (image @ params["query"].T).softmax(-1)[:, 1].mean()
    after = (image @ (params["query"] - 0.01 * step).T).softmax(-1)[:, 1].mean()
    assert after > before


def test_clients_held_out_have_no_key_and_predict_with_those_of_others(settings: Any) -> None:
    done = run_on_clip(settings, FedAPT(context_tokens=3), "new", federation={"rounds": 1, "held_out": 0.25})
    assert server_tensors(done)["keys"].shape[0] == 3
    assert len(done.client_accuracies()) == 1


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"key_size": -1.0}])
def test_settings_that_cannot_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        registry.build({"name": "fedapt", **given})
