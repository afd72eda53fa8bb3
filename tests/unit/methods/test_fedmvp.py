"""FedMVP: its network written out, attributes of classes, the limit without prompts' effect, and other classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import shared_tensors
from text_methods import gradient, noise_like, run_on_clip, runtime_of, working_parameters

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import Seen, cross_entropy
from fedprompt.errors import ConfigError
from fedprompt.methods.fedmvp import ANYTHING, FedMVP, runs
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit


def test_runs_are_means_of_consecutive_patches_as_torch_pools_them() -> None:
    rows = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))
    for parts in (1, 3, 4, 7):
        expected = F.adaptive_avg_pool1d(rows.mT, parts).mT
        torch.testing.assert_close(runs(7, parts) @ rows, expected)


def test_the_network_is_torchs_attention_and_a_gated_layer(settings: Any) -> None:
    method = FedMVP(vision_tokens=2, heads=4, prompt_init="random")
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    params = {n: t + noise_like(t, 3) if n.startswith("former.") else t for n, t in params.items()}
    images, positions = runtime.bank.images(0, "train"), torch.arange(3)
    batch = make_batch(method, images, positions, training=True)
    (slot,) = method.prompts(world, params, batch, {}).tokens
    own = {name.removeprefix("former."): tensor for name, tensor in params.items() if name.startswith("former.")}
    attributes = F.linear(params["attributes"], own["text.weight"], own["text.bias"])
    torso = torch.nn.MultiheadAttention(world.width, 4, batch_first=True)
    parts = ("query", "key", "value")
    torso.in_proj_weight.data = torch.cat([own[f"attention.{part}.weight"] for part in parts])
    torso.in_proj_bias.data = torch.cat([own[f"attention.{part}.bias"] for part in parts])
    torso.out_proj.weight.data, torso.out_proj.bias.data = own["attention.output.weight"], own["attention.output.bias"]
    patches = images.features("block_inputs:1", positions)[:, 0, 1:]
    asked = F.layer_norm(patches, patches.shape[-1:], own["queries_norm.weight"], own["queries_norm.bias"])
    said = F.layer_norm(attributes, attributes.shape[-1:], own["names_norm.weight"], own["names_norm.bias"])
    said = said.expand(3, -1, -1)
    mixed = torso(asked, said, said, need_weights=False)[0]
    inner = F.layer_norm(mixed, mixed.shape[-1:], own["feed_forward.norm.weight"], own["feed_forward.norm.bias"])
    value, gate = F.linear(inner, own["feed_forward.in.weight"], own["feed_forward.in.bias"]).chunk(2, -1)
    out = mixed + F.linear(value * F.gelu(gate), own["feed_forward.out.weight"], own["feed_forward.out.bias"])
    means = torch.stack([F.adaptive_avg_pool1d(each.T, 2).T for each in out])
    long = torch.stack([each.norm(dim=-1).mean() for each in patches])
    expected = means / means.norm(dim=-1, keepdim=True) * long.view(-1, 1, 1)
    torch.testing.assert_close(slot.tokens.squeeze(1), expected, atol=1e-5, rtol=1e-4)
    assert slot.blocks == (0,)


def test_the_loss_is_cross_entropy_and_the_distance_from_the_image_without_prompts(settings: Any) -> None:
    method = FedMVP(vision_tokens=2, consistency=3.0, prompt_init="random")
    runtime, world = runtime_of(settings, method)
    params, images, positions = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})
    logits = method.logits(world, params, seen, batch, {})
    classes = []
    for name in world.class_names:
        sentences = tuple(f"a photo of a {name}, {phrase}" for phrase in ANYTHING)
        classes.append(world.text.with_names(sentences).encode_names().mean(0))
    expected = world.text.scale * seen.image @ torch.stack(classes).T
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    plain = images.features("image", positions)
    apart = 1 - F.cosine_similarity(seen.image, plain)
    assert float(apart.max()) > 1e-4
    total = cross_entropy(logits, batch.labels).mean() + 3 * (world.text.scale / 100) ** 2 * apart.mean()
    torch.testing.assert_close(method.loss(world, params, logits, seen, batch, {}), total, atol=1e-5, rtol=1e-5)


def test_attributes_of_a_class_replace_the_general_ones_and_count_the_same_for_each(settings: Any) -> None:
    _, world = runtime_of(settings, FedMVP())
    first = world.class_names[0]
    method = FedMVP(attributes=(f"{first}: which is long",), words="a picture of")
    sentences, shares = method.sentences(world)
    assert sentences[:2] == [
        f"a picture of {first}, which is long",
        f"a picture of {world.class_names[1]}, {ANYTHING[0]}",
    ]
    torch.testing.assert_close(shares.sum(0), torch.ones(world.classes))
    assert shares[0, 0] == 1
    assert shares[1, 1] == 1 / len(ANYTHING)
    other = replace(world, class_names=("unseen",))
    assert len(method.sentences(other)[0]) == len(ANYTHING)


def test_blank_prompts_are_the_same_for_every_image_and_every_layer_learns(settings: Any) -> None:
    method = FedMVP(vision_tokens=2)
    runtime, world = runtime_of(settings, method)
    params, images, positions = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training=True)
    (slot,) = method.prompts(world, params, batch, {}).tokens
    blank = world.roles.shared["former.attention.output.bias"]
    assert float(blank.square().mean()) == pytest.approx(1, abs=1e-4)
    long = images.features("block_inputs:1", positions)[:, 0, 1:].norm(dim=-1).mean(-1)
    expected = F.normalize(blank, dim=0).expand_as(slot.tokens) * long.view(-1, 1, 1, 1)
    torch.testing.assert_close(slot.tokens, expected)
    for name in ("attention.output.weight", "attention.output.bias", "feed_forward.out.weight"):
        assert float(gradient(runtime, method, params, f"former.{name}").abs().max()) > 0


def test_with_blank_prompts_that_stay_it_is_classification_by_attributes(settings: Any) -> None:
    """The same images behind one constant prompt, and the classes as means of their attributes."""
    method = FedMVP(vision_tokens=3)
    runtime, world = runtime_of(settings, method)
    params, images, positions = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(5)
    batch = make_batch(method, images, positions, training=False)
    seen = forward(method, world, params, images, positions, batch, {})
    long = images.features("block_inputs:1", positions)[:, 0, 1:].norm(dim=-1).mean(-1)
    blank = F.normalize(world.roles.shared["former.attention.output.bias"], dim=0).expand(5, 1, 3, -1) * long.view(
        -1, 1, 1, 1
    )
    plain = runtime.bank.backbone.run(images.tokens(positions), [TokenPrompt(blank, (0,))], ("image",))["image"]
    torch.testing.assert_close(seen.image, plain, atol=1e-5, rtol=1e-5)


def test_prompts_are_as_long_as_patches_whatever_the_network_gives(settings: Any) -> None:
    """As in CLIP, where both go through its first norm: a large rate turns prompts and does not blow them up."""
    method = FedMVP(vision_tokens=2)
    runtime, world = runtime_of(settings, method)
    params, images, positions = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training=True)
    many = {name: 50 * each if "output" in name or "out." in name else each for name, each in params.items()}
    (slot,), (other,) = (method.prompts(world, each, batch, {}).tokens for each in (params, many))
    torch.testing.assert_close(slot.tokens, other.tokens, atol=1e-5, rtol=1e-4)
    patches = images.features("block_inputs:1", positions)[:, 0, 1:].norm(dim=-1).mean(-1)
    torch.testing.assert_close(slot.tokens.norm(dim=-1).mean((1, 2)), patches)


def test_a_move_that_changes_logits_as_much_costs_as_much_in_a_tower_of_another_scale(settings: Any) -> None:
    method = FedMVP(vision_tokens=2, consistency=10.0)
    runtime, world = runtime_of(settings, method)
    params, images, positions = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training=True)
    plain = images.features("image", positions)
    aside = F.normalize(torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)), dim=-1)
    costs = []
    for scale in (100.0, 25.0):
        other = replace(world, language=replace(world.text, scale=scale))
        moved = F.normalize(plain + 3 / scale * aside, dim=-1)
        seen = Seen(image=moved)
        zeros = torch.zeros(4, world.classes)
        with_it = method.loss(other, params, zeros, seen, batch, {})
        costs.append(float(with_it - replace(method, consistency=0.0).loss(other, params, zeros, seen, batch, {})))
    assert costs[0] == pytest.approx(costs[1], rel=0.05)


def test_only_the_network_is_sent_and_clients_count_the_same(settings: Any) -> None:
    done = run_on_clip(settings, FedMVP(vision_tokens=2), "former")
    assert all(name.startswith("former.") for name in shared_tensors(done))
    assert FedMVP().weighs_evenly
    assert not runtime_of(settings, FedMVP(vision_tokens=2))[1].roles.local


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"heads": 3}, "method.heads must divide the image tower's width 32, got 3"),
        ({"vision_tokens": 400}, r"method.vision_tokens must be at most the .* patches, got 400"),
        ({"attributes": ["a which is long"]}, "attributes"),
        ({"attributes": ["nothing: which is long"]}, "method.attributes must begin with the names of classes"),
        ({"consistency": -1.0}, "consistency"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "fedmvp", **given}))


def test_a_sentence_that_is_too_long_for_the_tower_is_refused(settings: Any) -> None:
    runtime, world = runtime_of(settings, FedMVP())
    method = FedMVP(attributes=(f"{world.class_names[0]}: which is " + "very " * 90 + "long",))
    with pytest.raises(ConfigError, match=r"method.attributes must leave every sentence at least .* tokens shorter"):
        method.check(world, runtime.config.train)
