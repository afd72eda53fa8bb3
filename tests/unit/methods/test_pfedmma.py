"""pFedMMA: adapters in both towers against naive ones, its limit zero-shot, and who owns what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import local_tensors, shared_tensors
from text_methods import gradient, run_on_clip, runtime_of, working_parameters

from fedprompt.backbones import layers
from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.errors import ConfigError, ContractError
from fedprompt.methods.pfedmma import PFedMMA
from fedprompt.methods.zero_shot import ZeroShot

pytestmark = pytest.mark.unit


def test_an_adapter_by_hand() -> None:
    """relu([1, -2]) = [1, 0]; 3 * 1 + 1 = 4; up: [0.5 * 4, -4 + 0.25] = [2, -3.75]."""
    weights = {
        "adapter.down.weight": torch.eye(2),
        "adapter.down.bias": torch.tensor([0.0, -1.0]),
        "adapter.middle.weight": torch.tensor([[3.0, 5.0]]),
        "adapter.middle.bias": torch.tensor([1.0]),
        "adapter.up.weight": torch.tensor([[0.5], [-1.0]]),
        "adapter.up.bias": torch.tensor([0.0, 0.25]),
    }
    found = layers.adapter(weights, torch.tensor([[1.0, -1.0]]))
    torch.testing.assert_close(found, torch.tensor([[2.0, -3.75]]))
    assert layers.adapter({}, torch.ones(1, 2)) == 0.0


def test_only_tensors_of_an_adapter_are_new_weights() -> None:
    weights = {"blocks.0.norm1.weight": torch.ones(2)}
    added = layers.with_changes(
        weights, {"blocks.0.adapter.up.bias": torch.ones(2), "blocks.0.norm1.weight": torch.ones(2)}
    )
    assert set(added) == {"blocks.0.norm1.weight", "blocks.0.adapter.up.bias"}
    assert torch.equal(added["blocks.0.norm1.weight"], torch.full((2,), 2.0))
    assert set(weights) == {"blocks.0.norm1.weight"}
    for wrong in ("blocks.0.adapter.side.bias", "blocks.1.adapter.up.bias", "blocks.0.norm2.weight"):
        with pytest.raises(ContractError, match="added weights must fit the backbone"):
            layers.with_changes(weights, {wrong: torch.ones(2)})


def test_the_last_block_of_both_towers_with_its_adapter_is_what_the_equation_says(settings: Any) -> None:
    """With an adapter beside the last block alone the towers differ from the frozen ones by alpha * adapter(LN z) there."""
    method = PFedMMA(blocks=1, width=3, scale=0.5)
    runtime, world = runtime_of(settings, method)
    params, images, positions = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(3)
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})

    def bottleneck(tower: str, z: torch.Tensor) -> torch.Tensor:
        def mapped(name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ params[f"{name}.weight"][0].T + params[f"{name}.bias"][0]

        return mapped(f"{tower}.up", F.relu(mapped("middle", F.relu(mapped(f"{tower}.down", z)))))

    backbone = runtime.bank.backbone
    last = backbone.depth - 1
    rows = backbone.block_inputs(images.tokens(positions), [last])[0]
    after = backbone._block(last, [rows], [])[0] + 0.5 * bottleneck(
        "image", backbone._norm(f"blocks.{last}.norm1", rows)
    )
    cls = backbone._norm("norm", after[:, 0])
    torch.testing.assert_close(seen.image, backbone.image_projection(cls), atol=1e-5, rtol=1e-4)
    plain = world.text.encode_words(method.words)
    assert float((seen.text["context"] - plain).abs().max()) > 1e-3
    unmoved = {n: torch.zeros_like(t) if n.startswith("text.up") else t for n, t in params.items()}
    still = forward(method, world, unmoved, images, positions, batch, {})
    torch.testing.assert_close(still.text["context"], plain, atol=1e-5, rtol=1e-4)


def test_the_text_tower_with_adapters_equals_a_naive_one(settings: Any) -> None:
    """CLIP's tower, whole sentences one by one with a mask, and the adapters written out."""
    method = PFedMMA(width=3, scale=0.5)
    runtime, world = runtime_of(settings, method)
    params, tower = working_parameters(runtime), runtime.bank.backbone.text
    changes = method.beside(params, "text", world.text.depth)
    found = world.text.encode_unstored(world.text.words(method.words)[None], "end", changes)[0]
    for number, name in enumerate(world.class_names):
        words = world.text.words(method.words)
        rest = tower.names([name])
        ids = [*rest.ids[0], *rest.stops[0], tower.end]
        x = torch.cat([tower.weights["token.weight"][[tower.start]], words, tower.weights["token.weight"][ids]])
        x = x + tower.weights["position.weight"][: len(x)]
        for block in range(tower.shape.depth):
            x = naive_block(tower, changes, block, x)
        end = F.layer_norm(
            x[-1], x.shape[-1:], tower.weights["norm.weight"], tower.weights["norm.bias"], tower.shape.norm_eps
        )
        torch.testing.assert_close(found[number], tower.projection(end[None])[0], atol=1e-5, rtol=1e-4)


def naive_block(tower: Any, changes: dict[str, torch.Tensor], block: int, x: torch.Tensor) -> torch.Tensor:
    w = {n.removeprefix(f"blocks.{block}."): t for n, t in tower.weights.items() if n.startswith(f"blocks.{block}.")}
    a = {n.removeprefix(f"blocks.{block}.adapter."): t for n, t in changes.items() if n.startswith(f"blocks.{block}.")}
    eps, heads, width = tower.shape.norm_eps, tower.shape.heads, tower.shape.width
    z = F.layer_norm(x, x.shape[-1:], w["norm1.weight"], w["norm1.bias"], eps)
    query, key, value = (z @ w["attention.in.weight"].T + w["attention.in.bias"]).chunk(3, dim=-1)
    mixed = []
    for head in range(heads):
        part = slice(head * width // heads, (head + 1) * width // heads)
        scores = query[:, part] @ key[:, part].T / (width // heads) ** 0.5
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
        mixed.append(scores.softmax(-1) @ value[:, part])
    out = x + torch.cat(mixed, dim=-1) @ w["attention.out.weight"].T + w["attention.out.bias"]
    hidden = F.layer_norm(out, x.shape[-1:], w["norm2.weight"], w["norm2.bias"], eps)
    hidden = layers.activate(tower.shape.activation, hidden @ w["mlp.in.weight"].T + w["mlp.in.bias"])
    out = out + hidden @ w["mlp.out.weight"].T + w["mlp.out.bias"]
    if not a:
        return out
    down = F.relu(z @ a["down.weight"].T + a["down.bias"])
    middle = F.relu(down @ a["middle.weight"].T + a["middle.bias"])
    return out + middle @ a["up.weight"].T + a["up.bias"]


def test_a_scale_of_zero_is_zero_shot(settings: Any) -> None:
    found = run_on_clip(settings, PFedMMA(width=3, scale=0.0), "still")
    plain = run_on_clip(settings, ZeroShot(), "plain")
    assert found.client_accuracies() == plain.client_accuracies()


def test_only_the_middle_travels_and_all_parts_learn(settings: Any) -> None:
    method = PFedMMA(width=4)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    assert set(world.roles.shared) == {"middle.weight", "middle.bias"}
    for name in (*world.roles.shared, *world.roles.local):
        assert float(gradient(runtime, method, params, name).abs().max()) > 0, name
    done = run_on_clip(settings, method, "adapters")
    assert set(shared_tensors(done)) == {"middle.weight", "middle.bias"}
    own = [local_tensors(done, client)["image.down.weight"] for client in range(4)]
    assert len({tuple(each.flatten().tolist()) for each in own}) == 4
    many = method.count(world)
    assert done.rounds()[-1].bytes_up == len(done.rounds()[-1].cohort) * 4 * many * (16 + 4)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"blocks": 99}, r"method.blocks must be at most the \d blocks of the shallower tower, got 99"),
        ({"words": ""}, "words"),
        ({"width": 0}, "width"),
        ({"scale": -1.0}, "scale"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "pfedmma", **given}))
