"""Captured attention is what the pass used: applied to the values it gives the normal output."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.block import run_block
from fedprompt.backbones.random_weights import TINY_CLIP_SHAPE, TINY_SHAPE, random_vit, tiny_clip
from fedprompt.backbones.shape import ViTShape, block_tensors
from fedprompt.backbones.vit import ViT
from fedprompt.inference.attention_maps import attention_weights, run_watched, watch_plain
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

SHAPES = {
    "vit": TINY_SHAPE,
    "registers": dataclasses.replace(TINY_SHAPE, extra_tokens=3, layer_scale=True),
    "clip": TINY_CLIP_SHAPE,
}
PROMPTS = {
    "none": (),
    "shallow": (TokenPrompt(torch.randn(1, 2, 32), (0,)),),
    "deep, for each image": (TokenPrompt(torch.randn(2, 3, 2, 32), (0, 1, 2)),),
    "two slots, one dropped": (
        TokenPrompt(torch.randn(2, 1, 32), (0, 1), mode="append"),
        TokenPrompt(torch.randn(1, 2, 32), (1,), after="drop"),
    ),
}


def backbone(kind: str) -> ViT:
    vit = random_vit(SHAPES[kind])
    return tiny_clip(vit) if kind == "clip" else vit


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("kind", SHAPES)
class TestWatching:
    def test_a_watched_pass_gives_the_bits_of_a_pass(self, kind: str, prompts: str, images: Tensor) -> None:
        vit = backbone(kind)
        reads = ("cls", "patches", "prompts")
        seen, _ = run_watched(vit, images, PROMPTS[prompts], reads)
        expected = vit.run(vit.embed(images), PROMPTS[prompts], reads)
        assert all(torch.equal(seen[name], expected[name]) for name in reads)

    def test_rows_sum_to_one_at_every_block(self, kind: str, prompts: str, images: Tensor) -> None:
        vit = backbone(kind)
        _, attention = run_watched(vit, images, PROMPTS[prompts])
        assert len(attention.blocks) == vit.shape.depth
        for looked in attention.blocks:
            for weights in (looked.rows, looked.heads):
                torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        torch.testing.assert_close(attention.rollout().sum(-1), torch.ones(2))

    def test_shares_of_all_kinds_of_rows_sum_to_one(self, kind: str, prompts: str, images: Tensor) -> None:
        _, attention = run_watched(backbone(kind), images, PROMPTS[prompts])
        shares = attention.shares(attention.at(-1))
        torch.testing.assert_close(torch.stack(list(shares.values())).sum(0), torch.ones(2))
        assert bool((shares["prompts"] > 0).all()) == bool(PROMPTS[prompts])


@pytest.mark.parametrize("kind", SHAPES)
def test_attention_of_cls_applied_to_the_values_gives_the_output_of_the_last_block(kind: str, images: Tensor) -> None:
    """By the formula, with CLS, extra tokens, patches and prompts in the order in which they are said to be."""
    vit = backbone(kind)
    prompt = PROMPTS["shallow"]
    deep = TokenPrompt(torch.randn(1, 2, 32), (2,))
    _, attention = run_watched(vit, images, (*prompt, deep))
    seen = vit.run(vit.embed(images), (*prompt, deep), ("cls",))["cls"]
    rows = _inputs_of_the_last_block(vit, images, prompt, deep)
    weights = {name: vit.weights[f"blocks.2.{name}"] for name in block_tensors(vit.shape)}
    normed = layers.norm(weights, "norm1", rows, vit.shape.norm_eps)
    value = F.linear(normed, weights["attention.in.weight"], weights["attention.in.bias"]).chunk(3, -1)[2]
    by_head = value.unflatten(-1, (vit.shape.heads, -1)).transpose(1, 2)
    mixed = torch.einsum("bhr,bhre->bhe", attention.blocks[-1].heads, by_head).flatten(1)
    x = rows[:, 0] + _scaled(weights, "scale1", layers.linear(weights, "attention.out", mixed))
    inner = layers.linear(weights, "mlp.in", layers.norm(weights, "norm2", x, vit.shape.norm_eps))
    x = x + _scaled(weights, "scale2", layers.linear(weights, "mlp.out", layers.activate(vit.shape.activation, inner)))
    torch.testing.assert_close(layers.norm(vit.weights, "norm", x, vit.shape.norm_eps), seen, atol=1e-5, rtol=1e-5)


def _scaled(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x * weights[name] if name in weights else x


def _inputs_of_the_last_block(vit: ViT, images: Tensor, shallow: tuple[TokenPrompt, ...], deep: TokenPrompt) -> Tensor:
    """[image, carried prompts, new prompts] before block 2."""
    fresh = shallow[0].tokens[0].expand(2, -1, -1)
    fresh = layers.norm(vit.weights, "ln_pre", fresh, vit.shape.norm_eps) if vit.shape.ln_pre else fresh
    rows = torch.cat([vit.embed(images), fresh], dim=1)
    for block in range(2):
        weights = {name: vit.weights[f"blocks.{block}.{name}"] for name in block_tensors(vit.shape)}
        (rows,) = run_block(weights, vit.shape, [rows], [])
    return torch.cat([rows, deep.tokens[0].expand(2, -1, -1)], dim=1)


def test_attention_weights_follow_the_formula() -> None:
    shape = ViTShape(width=2, depth=1, heads=1, mlp_width=2, patch=1, image_size=1)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, generator=generator) for name, size in block_tensors(shape).items()}
    rows = torch.randn(1, 3, 2, generator=generator)
    normed = F.layer_norm(rows[0], (2,), weights["norm1.weight"], weights["norm1.bias"], shape.norm_eps)
    query, key, _ = (normed @ weights["attention.in.weight"].T + weights["attention.in.bias"]).chunk(3, -1)
    expected = ((query @ key.T) / 2**0.5).softmax(-1)
    torch.testing.assert_close(attention_weights(weights, shape, rows)[0, 0], expected)


def test_blocks_of_the_stem_are_watched_too(images: Tensor) -> None:
    vit = dataclasses.replace(random_vit(), stem=1)
    _, attention = watch_plain(vit, images)
    assert len(attention.blocks) == 3


def test_a_map_of_patches_sums_to_one_and_lies_as_the_image_does(images: Tensor) -> None:
    _, attention = watch_plain(random_vit(), images)
    where = attention.at(-1)
    grid = attention.grid(where)
    torch.testing.assert_close(grid.sum((1, 2)), torch.ones(2))
    torch.testing.assert_close(grid[:, 1, 2] / grid[:, 0, 0], where[:, 1 + 4 + 2] / where[:, 1])


def test_rollout_of_one_block_is_half_of_its_attention_and_half_of_cls() -> None:
    vit = random_vit(dataclasses.replace(TINY_SHAPE, depth=1))
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    _, attention = run_watched(vit, images, PROMPTS["shallow"])
    found, looked = attention.rollout()[0], attention.at(0)[0]
    expected = torch.cat([looked[:17], looked[17:].sum(0, keepdim=True)]) / 2
    expected[0] += 0.5
    torch.testing.assert_close(found, expected)
