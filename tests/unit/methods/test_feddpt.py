"""Fed-DPT: contexts and vision prompts of domains, their weights, what is sent, and the limit of one domain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import run, server_tensors, shared_tensors
from text_methods import gradient, noise_like, on_clip, run_on_clip, runtime_of, working_parameters

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import Server, cross_entropy
from fedprompt.errors import ConfigError
from fedprompt.methods.feddpt import FedDPT
from fedprompt.methods.fedmaple import FedMaPLe
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit


def apart(world: Any) -> Server:
    """A server whose domains have contexts and vision prompts that differ."""
    shared = {name: tensor + noise_like(tensor, 1) for name, tensor in world.roles.shared.items()}
    return Server(shared, {name: tensor + noise_like(tensor, 2) for name, tensor in world.roles.server.items()})


@pytest.mark.parametrize("training", [True, False])
def test_logits_mix_the_contexts_by_what_the_tower_sees_of_the_domain(settings: Any, training: bool) -> None:
    method = FedDPT(context_tokens=2, temperature=0.3)
    runtime, world = runtime_of(settings, method)
    server = apart(world)
    params = working_parameters(runtime, 1, server)
    if training:  # another context than the one that arrived
        params["context"] = params["context"] + noise_like(params["context"], 4)
    images, positions = runtime.bank.images(1, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training)
    seen = forward(method, world, params, images, positions, batch, {})
    slot = TokenPrompt(params["vision"], (0,))
    rows = runtime.bank.backbone.run(images.tokens(positions), [slot], ("cls", "prompts", "image"))
    contexts = server.own["context"].clone()
    contexts[1] = params["context"]
    text = torch.cat([world.text.encode(each.unsqueeze(0), "end") for each in contexts])
    for row in range(4):
        likeness = F.cosine_similarity(rows["cls"][row], rows["prompts"][row], dim=-1)
        weights = (likeness / 0.3).softmax(0)
        mixed = F.normalize(sum(w * each for w, each in zip(weights, text, strict=True)), dim=-1)  # type: ignore[arg-type]
        expected = world.text.scale * mixed @ rows["image"][row]
        found = method.logits(world, params, seen, batch, {})[row]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(method.log_weights(seen)[row].exp(), weights, atol=1e-5, rtol=1e-4)


def test_the_loss_teaches_the_domain_of_the_client(settings: Any) -> None:
    method = FedDPT(context_tokens=2, domain_weight=0.7)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime, 2, apart(world))
    images, positions = runtime.bank.images(2, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})
    logits = method.logits(world, params, seen, batch, {})
    expected = cross_entropy(logits, batch.labels).mean() - 0.7 * method.log_weights(seen)[:, 2].mean()
    torch.testing.assert_close(method.loss(world, params, logits, seen, batch, {}), expected)


def test_a_client_trains_its_own_context_and_all_vision_prompts(settings: Any) -> None:
    method = FedDPT(context_tokens=2)
    runtime, _ = runtime_of(settings, method)
    params = working_parameters(runtime)
    assert float(gradient(runtime, method, params, "context").abs().max()) > 0
    assert float(gradient(runtime, method, params, "vision").abs().amax((0, 2)).min()) > 0


def test_only_clients_that_took_part_change_their_context(settings: Any) -> None:
    one_of_four = {"federation": {"rounds": 1, "fraction": 0.25}}
    done = run_on_clip(settings, FedDPT(context_tokens=2), "domains", **one_of_four)
    _, world = runtime_of(settings, FedDPT(context_tokens=2))
    moved = (server_tensors(done)["context"] - world.roles.server["context"]).abs().amax((1, 2))
    assert int((moved > 0).sum()) == 1
    assert set(shared_tensors(done)) == {"vision"}


def test_one_domain_is_independent_prompts_of_both_towers(settings: Any) -> None:
    alone = {"partition": {"scheme": "iid", "clients": 1}, "train": {"lr": 0.01}}
    found = run(on_clip(settings, "domain", **alone), FedDPT(context_tokens=2, domain_weight=3.0))
    method = FedMaPLe(coupling="independent", context_tokens=2, vision_tokens=1, vision_depth=1)
    plain = run(on_clip(settings, "plain", **alone), method)
    expected = shared_tensors(plain)
    torch.testing.assert_close(shared_tensors(found)["vision"], expected["vision"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(server_tensors(found)["context"][0], expected["context"], atol=1e-5, rtol=1e-4)


def test_a_client_held_out_has_no_domain_and_predicts_with_all(settings: Any) -> None:
    done = run_on_clip(settings, FedDPT(context_tokens=2), "new", federation={"rounds": 1, "held_out": 0.25})
    assert server_tensors(done)["context"].shape[0] == 3
    assert len(done.client_accuracies()) == 1


@pytest.mark.parametrize(
    ("given", "complaint"),
    [({"temperature": 0.0}, "temperature"), ({"class_specific": True}, "method.class_specific must be false")],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "feddpt", **given}))
