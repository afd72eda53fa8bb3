"""FedCoCoOp: the network's formula, the sentences of every image, and its limit PromptFL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import seeded, shared_tensors, worst_difference
from text_methods import gradient, noise_like, run_on_clip, runtime_of, working_parameters

from fedprompt.backbones.dual_encoder import Memory
from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.recipe import Recipe
from fedprompt.errors import ConfigError
from fedprompt.methods.fedcocoop import FedCoCoOp, shift
from fedprompt.methods.promptfl import PromptFL
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

HAND = {
    "in.weight": torch.tensor([[1.0, 0.0], [0.0, -1.0]]),
    "in.bias": torch.tensor([0.5, 0.0]),
    "out.weight": torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0]]),
    "out.bias": torch.tensor([0.0, 0.1, 0.0]),
}


def test_the_shift_of_an_image_by_hand() -> None:
    """hidden = relu([0.6 + 0.5, -0.8]) = [1.1, 0], then [2.2, 0.1, 1.1]; and relu([-0.5, 1]) = [0, 1] gives [1, 3.1, 1]."""
    image = torch.tensor([[0.6, 0.8], [-1.0, -1.0]])
    torch.testing.assert_close(shift(HAND, image), torch.tensor([[2.2, 0.1, 1.1], [1.0, 3.1, 1.0]]))


def disturbed(params: Tensors) -> Tensors:
    return {name: tensor + noise_like(tensor, 3) if "meta" in name else tensor for name, tensor in params.items()}


def test_logits_are_those_of_each_image_with_its_own_class_texts(settings: Any) -> None:
    method = FedCoCoOp(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    params = disturbed(working_parameters(runtime))
    images, positions = runtime.bank.images(0, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})
    found = method.logits(world, params, seen, batch, {})
    features = images.features("image", positions)
    for row, image in enumerate(features):
        moved = shift({name.removeprefix("meta_net."): t for name, t in params.items()}, image.unsqueeze(0))[0]
        text = world.text.encode((params["context"] + moved).unsqueeze(0), "end")[0]
        torch.testing.assert_close(found[row], world.text.scale * text @ image, atol=1e-4, rtol=1e-5)
    assert float((found[0] - world.text.scale * seen.text["context"][1] @ features[0]).abs().max()) > 1e-3


def test_contexts_per_image_are_not_stored(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They never come again; the stored features of shared contexts would be thrown out for them."""
    method = FedCoCoOp(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    images, positions = runtime.bank.images(0, "train"), torch.arange(3)
    batch = make_batch(method, images, positions, training=False)
    stored: list[int] = []
    monkeypatch.setattr(Memory, "get", lambda memory, *asked: stored.append(1) or asked[2](asked[1]))
    with torch.no_grad():
        found = forward(method, world, params, images, positions, batch, {}).text["context"]
        assert not stored
        shared = world.text.encode(params["context"].unsqueeze(0), "end")
        assert stored
    torch.testing.assert_close(found, shared.expand(3, -1, -1))  # the network starts at zero


def test_a_network_that_is_not_trained_leaves_promptfl(settings: Any) -> None:
    still = {"train": {"lr": 0.05, "lrs": {"meta_net.*": 0.0}}}
    found = run_on_clip(settings, FedCoCoOp(context_tokens=3), "cocoop", **still)
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain", train={"lr": 0.05})
    assert float((shared_tensors(found)["context"] - shared_tensors(plain)["context"]).abs().max()) < 1e-6
    assert found.client_accuracies() == plain.client_accuracies()


def test_everything_learns_and_is_averaged(settings: Any) -> None:
    method = FedCoCoOp(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    params = disturbed(working_parameters(runtime))
    assert not world.roles.local
    for name in world.roles.shared:
        assert float(gradient(runtime, method, params, name).abs().max()) > 0, name
    done = run_on_clip(settings, method, "cocoop")
    assert worst_difference(shared_tensors(done), world.roles.shared) > 1e-4


def test_sizes_follow_the_reduction_and_the_start(settings: Any) -> None:
    _, world = runtime_of(settings, FedCoCoOp())
    drawn = FedCoCoOp(start="random", reduction=4).init(world, seeded()).shared
    width, features = world.text.width, world.text.features
    assert drawn["meta_net.in.weight"].shape == (features // 4, features)
    assert drawn["meta_net.out.weight"].shape == (width, features // 4)
    assert float(drawn["meta_net.out.weight"].abs().max()) > 0
    assert float(FedCoCoOp().init(world, seeded()).shared["meta_net.out.weight"].abs().max()) == 0
    assert isinstance(FedCoCoOp().recipe, Recipe)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"class_specific": True}, "method.class_specific must be false"),
        ({"reduction": 129}, "method.reduction must be at most the 128 dimensions of the features, got 129"),
        ({"reduction": 0}, "method.reduction"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "fedcocoop", **given}))
