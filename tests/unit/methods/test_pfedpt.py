"""pFedPT: a local prompt, a shared head, and their turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import experiment, local_tensors, run, shared_tensors, worst_difference

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.methods.head_tune import HeadTune
from fedprompt.methods.pfedpt import PFedPT

pytestmark = pytest.mark.unit

WHOLE = {"federation": {"rounds": 2, "fraction": 1.0}}


def test_the_prompt_stays_and_the_head_travels(settings: Any) -> None:
    done = run(settings(**WHOLE), PFedPT(prompt_tokens=3))
    assert set(shared_tensors(done)) == {"head.weight", "head.bias"}
    own = [local_tensors(done, client)["prompt"] for client in range(4)]
    assert len({tuple(each.flatten().tolist()) for each in own}) == 4


def test_the_prompt_is_trained_first_and_then_the_head_alone(settings: Any) -> None:
    method = PFedPT(prompt_epochs=3)
    made = experiment(settings(train={"epochs": 2}), method)
    _, _, _, world = made.factory.prepare()
    stages = method.stages(world, made.config.train)
    assert [(stage.trainable, stage.epochs) for stage in stages] == [
        (("prompt",), 3),
        (("head.weight", "head.bias"), 2),
    ]
    (only,) = PFedPT(prompt_epochs=0).stages(world, made.config.train)
    assert only.trainable == ("head.weight", "head.bias")


def test_a_first_round_trains_no_prompt_because_its_head_is_zero(settings: Any) -> None:
    """The head begins at zero and the prompt goes first: there is nothing to learn from until the head has been trained."""
    one = run(settings(name="one", federation={"rounds": 1, "fraction": 1.0}), PFedPT(prompt_tokens=3))
    _, _, _, world = experiment(settings(), PFedPT(prompt_tokens=3)).factory.prepare()
    assert all(torch.equal(local_tensors(one, client)["prompt"], world.roles.local["prompt"]) for client in range(4))


def test_without_prompt_tokens_it_is_a_tuned_shared_head(settings: Any) -> None:
    found = run(settings(name="found", **WHOLE), PFedPT(prompt_tokens=0, prompt_epochs=0))
    plain = run(settings(name="plain", **WHOLE), HeadTune(head="shared"))
    assert worst_difference(shared_tensors(found), shared_tensors(plain)) < 1e-5


def test_the_model_is_fedvpts(settings: Any) -> None:
    _, _, _, world = experiment(settings(), PFedPT()).factory.prepare()
    _, _, _, other = experiment(settings(), FedVPT(head="shared")).factory.prepare()
    mine = {**world.roles.shared, **world.roles.local}
    assert set(mine) == set(other.roles.shared)
    assert all(torch.equal(tensor, other.roles.shared[name]) for name, tensor in mine.items())


@pytest.mark.parametrize("given", [{"head": "local"}, {"prompt_epochs": -1}])
def test_settings_that_cannot_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        registry.build({"name": "pfedpt", **given})


# a frame of pixels


def test_the_frame_is_added_to_the_image_and_nothing_else(settings: Any) -> None:
    method = PFedPT(form="pixels", border=2, prompt_init="random")
    made = experiment(settings(), method)
    source, manifest, backbone, world = made.factory.prepare()
    images = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    ).images(0, "train")
    params, positions = {**world.roles.shared, **world.roles.local}, torch.arange(3)
    params["head.weight"] = torch.randn(params["head.weight"].shape, generator=torch.Generator().manual_seed(0))
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})
    pixels = images.store.pixels(images.indices[:3])
    shown = normalise(pixels, backbone.mean, backbone.std, torch.float32, torch.device("cpu"))
    side = shown.shape[-1]
    whole = torch.zeros(3, side, side)
    for rows, columns in ((slice(2), slice(side)), (slice(side - 2, side), slice(side)),
                          (slice(side), slice(2)), (slice(side), slice(side - 2, side))):  # fmt: skip
        whole[:, rows, columns] = params["prompt"][:, rows, columns]
    assert torch.equal(whole, params["prompt"])
    expected = backbone.run(backbone.embed(shown + whole))["cls"]
    torch.testing.assert_close(seen.cls, expected, atol=1e-5, rtol=1e-4)


def test_a_frame_that_stays_at_zero_is_a_tuned_shared_head(settings: Any) -> None:
    found = run(settings(name="found", **WHOLE), PFedPT(form="pixels", border=2, prompt_epochs=0))
    plain = run(settings(name="plain", **WHOLE), HeadTune(head="shared"))
    assert worst_difference(shared_tensors(found), shared_tensors(plain)) < 1e-5


def test_every_client_learns_a_frame_of_its_own_and_only_at_the_edge(settings: Any) -> None:
    done = run(settings(**WHOLE), PFedPT(form="pixels", border=2))
    frames = [local_tensors(done, client)["prompt"] for client in range(4)]
    assert len({tuple(each.flatten().tolist()) for each in frames}) == 4
    for each in frames:
        assert float(each.abs().max()) > 0
        assert float(each[:, 2:-2, 2:-2].abs().max()) == 0
    assert set(shared_tensors(done)) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("given", "changes", "complaint"),
    [
        ({"border": 99}, {}, "method.border must be at most half of the"),
        ({}, {"backbone": {"name": "tiny", "stem": 1}}, "method.form must be tokens where no pixels can be added"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(settings: Any, given: Any, changes: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        experiment(settings(**changes), PFedPT(form="pixels", **given)).factory.prepare()
