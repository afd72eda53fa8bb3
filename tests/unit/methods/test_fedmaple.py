"""FedMaPLe and FedVLP: the coupling against torch's linear layers, limits against PromptFL, sizes against MaPLe's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import experiment, run, seeded, shared_tensors, worst_difference
from torch import Tensor

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch, step_loss
from fedprompt.core import registry
from fedprompt.core.method import Batch, Method, World
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.methods.fedmaple import FedMaPLe
from fedprompt.methods.promptfl import PromptFL
from fedprompt.modules.contexts import Language
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

SHORT = {"federation": {"rounds": 2, "fraction": 0.5, "evaluate_every": 9, "evaluate_last": 1}}


def prepared(settings: dict[str, Any], method: Method) -> tuple[World, DualEncoder, ClientRuntime]:
    made = experiment(settings, method)
    source, manifest, backbone, world = made.factory.prepare()
    assert isinstance(backbone, DualEncoder)
    bank = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )
    states = ClientStates(lambda client: None)
    return world, backbone, ClientRuntime(made.config, world, method, bank, states, source.domain_names)


def clip_world(method: Method) -> World:
    """The widths of CLIP ViT-B/16, without its weights."""
    language = Language(512, 512, 100.0, lambda words: torch.zeros(len(words.split()), 512), lambda *_: torch.empty(0))
    world = World(768, 12, 197, 16, ("a", "b", "c"), ("one", "two"), language=language)
    return replace(world, roles=method.init(world, seeded()))


def count(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def vision_of(method: FedMaPLe, world: World, params: Tensors) -> TokenPrompt:
    (slot,) = method.prompts(world, params, Batch(torch.zeros(3, dtype=torch.long)), {}).tokens
    return slot


def test_vision_prompts_are_linear_maps_of_the_context(settings: Any) -> None:
    method = FedMaPLe(context_tokens=3)
    world, _, _ = prepared(settings(), method)
    params = world.roles.shared
    slot = vision_of(method, world, params)
    assert slot.blocks == (0, 1, 2)
    for block in range(3):
        weight, bias = params["coupling.weight"][block], params["coupling.bias"][block]
        torch.testing.assert_close(slot.tokens[block], F.linear(params["context"], weight, bias))
    nothing = vision_of(method, world, {**params, "context": torch.zeros(3, 32)}).tokens
    torch.testing.assert_close(nothing, params["coupling.bias"].unsqueeze(1).expand(3, 3, 32))


def test_independent_vision_prompts_are_parameters(settings: Any) -> None:
    method = FedMaPLe(coupling="independent", context_tokens=3, vision_tokens=5, vision_depth=2)
    world, _, _ = prepared(settings(), method)
    params = world.roles.shared
    slot = vision_of(method, world, {**params, "context": torch.zeros(3, 32)})
    assert slot.tokens is params["vision"]
    assert slot.tokens.shape == (2, 5, 32)
    assert slot.blocks == (0, 1)


@pytest.mark.parametrize("coupling", ["maple", "independent"])
def test_logits_are_those_of_both_prompted_towers(settings: Any, coupling: Any) -> None:
    method = FedMaPLe(coupling=coupling, context_tokens=3, vision_depth=2)
    world, backbone, runtime = prepared(settings(), method)
    params = world.roles.shared
    images, positions = runtime.bank.images(0, "train"), torch.arange(5)
    batch = make_batch(method, images, positions, training=True)
    found = method.logits(world, params, forward(method, world, params, images, positions, batch, {}), batch, {})
    text = world.text.encode(params["context"].unsqueeze(0), "end")[0]
    slot = vision_of(method, world, params)
    image = backbone.run(images.tokens(positions), [slot], ("image",))["image"]
    torch.testing.assert_close(found, backbone.scale * image @ text.T)
    plain = backbone.scale * images.features("image", positions) @ text.T
    assert float((found - plain).abs().max()) > 1e-2, "the image tower is prompted"


def test_the_context_learns_from_both_towers_when_coupled(settings: Any) -> None:
    """d loss / d P is the text tower's part plus the image tower's, led back through the maps."""
    method = FedMaPLe(context_tokens=3, vision_depth=2)
    world, _, runtime = prepared(settings(), method)
    params, images = world.roles.shared, runtime.bank.images(0, "train")
    context = params["context"].clone().requires_grad_()
    loss = step_loss(method, world, {**params, "context": context}, images, torch.arange(8), {})
    (found,) = torch.autograd.grad(loss, [context])

    independent = replace(method, coupling="independent")
    vision = vision_of(method, world, params).tokens.detach().requires_grad_()
    context = params["context"].clone().requires_grad_()
    loss = step_loss(independent, world, {"context": context, "vision": vision}, images, torch.arange(8), {})
    by_text, by_vision = torch.autograd.grad(loss, [context, vision])
    led_back = sum(by_vision[block] @ params["coupling.weight"][block] for block in range(2))
    assert isinstance(led_back, Tensor)
    torch.testing.assert_close(found, by_text + led_back, atol=1e-5, rtol=1e-4)
    assert float(led_back.abs().max()) > 1e-4


def test_without_vision_tokens_it_is_promptfl(settings: Any) -> None:
    found = run(settings(name="one", **SHORT), FedMaPLe(coupling="independent", vision_tokens=0, context_tokens=3))
    expected = run(settings(name="two", **SHORT), PromptFL(context_tokens=3))
    assert worst_difference(shared_tensors(found), shared_tensors(expected)) == 0
    assert found.client_accuracies() == expected.client_accuracies()


@pytest.mark.parametrize("coupling", ["maple", "independent"])
def test_everything_is_averaged_and_nothing_is_kept(settings: Any, coupling: Any) -> None:
    method = FedMaPLe(coupling=coupling, context_tokens=2)
    done = run(settings(**SHORT), method)
    names = {"maple": {"coupling.weight", "coupling.bias"}, "independent": {"vision"}}[coupling]
    assert set(shared_tensors(done)) == {"context", *names}
    size = {"maple": 3 * (32 * 32 + 32), "independent": 3 * 2 * 32}[coupling]
    assert done.rounds()[-1].bytes_up == done.rounds()[-1].bytes_down == 2 * 4 * (2 * 32 + size)
    world, _, _ = prepared(settings(), method)
    assert not world.roles.local
    for name, tensor in shared_tensors(done).items():
        assert not torch.equal(tensor, world.roles.shared[name]), f"{name} is trained"


def test_sizes_at_the_widths_of_clip() -> None:
    maple = clip_world(FedMaPLe(context_tokens=2)).roles.shared
    assert maple["coupling.weight"].shape == (9, 768, 512)
    assert count(maple) == 2 * 512 + 9 * (768 * 512 + 768) == 3_546_880
    assert 0.95 * 512**-0.5 < float(maple["coupling.weight"].abs().max()) <= 512**-0.5
    independent = clip_world(FedMaPLe(coupling="independent", context_tokens=2, vision_start="random")).roles.shared
    assert count(independent) == 2 * 512 + 9 * 2 * 768
    assert float(independent["vision"].std()) == pytest.approx(0.02, rel=0.05)


def test_words_say_how_many_tokens_both_towers_get() -> None:
    roles = clip_world(FedMaPLe(coupling="independent", context_words="a photo of a")).roles
    assert roles.shared["context"].shape == (4, 512)
    assert roles.shared["vision"].shape == (9, 4, 768)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"vision_depth": 4}, "method.vision_depth must be at most the 3 blocks of the backbone, got 4"),
        (
            {"vision_tokens": 3, "context_tokens": 2},
            "method.vision_tokens must be the 2 of the context, or null, with coupling maple, got 3",
        ),
        (
            {"vision_tokens": 0, "context_tokens": 2},
            "method.vision_tokens must be the 2 of the context, or null, with coupling maple, got 0",
        ),
        ({"class_specific": True}, "method.class_specific must be false with coupling maple, got True"),
        ({"coupling": "loose"}, "method.coupling"),
        ({"vision_depth": 0}, "method.vision_depth"),
        ({"vision_tokens": -1, "coupling": "independent"}, "method.vision_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        prepared(settings(), registry.build({"name": "fedmaple", **given}))


def test_independent_prompts_go_with_class_specific_contexts(settings: Any) -> None:
    done = run(
        settings(**SHORT), FedMaPLe(coupling="independent", context_tokens=2, class_specific=True, vision_tokens=1)
    )
    assert shared_tensors(done)["context"].shape == (5, 2, 32)
    assert shared_tensors(done)["vision"].shape == (3, 1, 32)
