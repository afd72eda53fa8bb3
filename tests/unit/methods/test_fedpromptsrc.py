"""FedPromptSRC: its loss term by term, the Gaussian over rounds, and its limit FedMaPLe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import run, server_tensors, shared_tensors, worst_difference
from text_methods import noise_like, on_clip, runtime_of, working_parameters

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import Server, Upload, cross_entropy
from fedprompt.errors import ConfigError
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.fedmaple import FedMaPLe
from fedprompt.methods.fedpromptsrc import FedPromptSRC, divergence
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

SMALL: Any = {"context_tokens": 2, "vision_depth": 1}
FREE: Any = {"text_weight": 0.0, "image_weight": 0.0, "logit_weight": 0.0, "gaussian": False}


def test_the_divergence_by_hand() -> None:
    """Predictions (3/4, 1/4) before and (1/2, 1/2) now: 0.75 log 1.5 + 0.25 log 0.5."""
    before, now = torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2)
    assert float(divergence(before, now)) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert float(divergence(before, before)) == pytest.approx(0.0, abs=1e-7)


def test_the_loss_is_the_papers_term_by_term(settings: Any) -> None:
    method = FedPromptSRC(text_weight=3.0, image_weight=5.0, logit_weight=2.0, templates=("a photo of a", "a"), **SMALL)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    params["vision"] = params["vision"] + noise_like(params["vision"], 1)
    images, positions = runtime.bank.images(0, "train"), torch.arange(5)
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})
    logits = method.logits(world, params, seen, batch, {})
    fixed = F.normalize((world.text.encode_words("a photo of a") + world.text.encode_words("a")) / 2, dim=-1)
    image = images.features("image", positions)
    zero_shot = world.text.scale * image @ fixed.T
    kl = F.kl_div(logits.log_softmax(1), zero_shot.log_softmax(1), reduction="sum", log_target=True) / logits.numel()
    expected = cross_entropy(logits, batch.labels).mean() + 2 * kl
    expected = expected + 3 * F.l1_loss(seen.text["context"], fixed) + 5 * F.l1_loss(seen.image, image)
    torch.testing.assert_close(method.loss(world, params, logits, seen, batch, {}), expected)
    assert float(kl) > 0


def test_the_server_keeps_a_gaussian_mean_of_its_rounds(settings: Any) -> None:
    method = FedPromptSRC(gaussian_mean=0.5, gaussian_deviation=0.25, **SMALL)
    runtime, world = runtime_of(settings, method, federation={"rounds": 4})
    assert world.rounds == 4
    server = Server(world.roles.shared, world.roles.server)
    rounds, weights = [], []
    for number in (1, 2, 3, 4):
        tensors = {name: noise_like(tensor, number, 1.0) for name, tensor in world.roles.shared.items()}
        server = Server(server.shared, server.own, number - 1)  # a server still has the round before
        server = method.aggregate(world, server, [Upload(0, tensors, 1.0)], weighted_mean)
        rounds.append(tensors["context"])
        weights.append(math.exp(-((number - 2) ** 2) / 2))
        expected = sum(w * c for w, c in zip(weights, rounds, strict=True)) / sum(weights)
        torch.testing.assert_close(server.own["mean.context"], expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(server.shared["context"], rounds[-1])
    sent = method.download(world, server, 0)
    client = runtime._client(0, 4)
    assert torch.equal(method.begin(world, client, sent, {})["context"], rounds[-1])
    predicted = method.personalise(world, client, sent, {})
    assert torch.equal(predicted["context"], server.own["mean.context"])


def test_weights_that_underflow_make_an_average_all_the_same(settings: Any) -> None:
    """At 100 rounds the first has the weight e^-1369 with the paper's mean and deviation."""
    method = FedPromptSRC(gaussian_deviation=0.01, **SMALL)
    _, world = runtime_of(settings, method, federation={"rounds": 100})
    server = Server(world.roles.shared, world.roles.server)
    for number in (1, 2):
        tensors: Tensors = {n: torch.full_like(t, float(number)) for n, t in world.roles.shared.items()}
        server = Server(server.shared, server.own, number - 1)  # a server still has the round before
        server = method.aggregate(world, server, [Upload(0, tensors, 1.0)], weighted_mean)
        assert torch.equal(server.own["mean.context"], tensors["context"])


def test_without_regulation_it_is_independent_prompts(settings: Any) -> None:
    found = run(on_clip(settings, "regulated"), FedPromptSRC(**SMALL, **FREE))
    plain = run(on_clip(settings, "plain"), FedMaPLe(coupling="independent", **SMALL))
    assert worst_difference(shared_tensors(found), shared_tensors(plain)) == 0
    assert found.client_accuracies() == plain.client_accuracies()


def test_a_run_predicts_with_the_mean_of_its_rounds(settings: Any) -> None:
    done = run(on_clip(settings, "mean"), FedPromptSRC(**SMALL))
    last, mean = shared_tensors(done), server_tensors(done)
    assert set(mean) == {"mean.context", "mean.vision", "log_weight"}
    assert float((last["context"] - mean["mean.context"]).abs().max()) > 0


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"coupling": "maple"}, "coupling"),
        ({"vision_tokens": 0}, "method.vision_tokens must be at least 1"),
        ({"templates": ("",)}, "method.templates must have at least one token"),
        ({"text_weight": -1.0}, "text_weight"),
        ({"gaussian_mean": 1.5}, "gaussian_mean"),
        ({"gaussian_deviation": 0.0}, "gaussian_deviation"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "fedpromptsrc", **given}))
