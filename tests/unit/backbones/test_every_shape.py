"""Stem, kept inputs, pauses, changed weights, compiled blocks and bfloat16 work for every kind of transformer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from unit.backbones.naive_vit import naive_run
from unit.backbones.test_vit_prompts import BATCH, DEPTH, SHAPES, WIDTH, double_vit, random_prompts, random_tokens

from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.torch_compile import CompiledBlock
from fedprompt.backbones.vit import READS
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit


def random(*size: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", SHAPES)
def test_behind_a_stem_blocks_are_those_of_the_whole_transformer(kind):
    whole, images = double_vit(kind), random(BATCH, 3, 8, 8)
    vit, prompt = dataclasses.replace(whole, stem=2), TokenPrompt(random(2, 2, WIDTH), (0, 1))
    found = vit.run(vit.embed(images), [prompt], READS)
    expected = naive_run(whole, whole.embed(images), [dataclasses.replace(prompt, blocks=(2, 3))])[0]
    for name in READS:
        close(found[name], expected[name])
    close(vit.read_early(vit.embed(images), 1), whole.read_early(whole.embed(images), 3))


@pytest.mark.parametrize("kind", SHAPES)
def test_a_pass_from_kept_inputs_is_the_whole_pass(kind):
    vit = double_vit(kind)
    tokens, prompt = random_tokens(vit), TokenPrompt(random(2, 2, WIDTH), (2, 3))
    (kept,) = vit.block_inputs(tokens, [2])
    close(vit.run(kept, [prompt], start=2)["cls"], vit.run(tokens, [prompt])["cls"])


@pytest.mark.parametrize("kind", SHAPES)
def test_prompts_that_join_at_a_pause_are_as_if_given_beforehand(kind):
    vit, (given,) = double_vit(kind), random_prompts("shallow", per_sample=False)
    tokens, joining, shown = random_tokens(vit), TokenPrompt(random(BATCH, 2, 1, WIDTH), (2, 3)), []
    paused = vit.run(tokens, [given], READS, pause=(2, lambda summary: shown.append(summary) or [joining]))
    beforehand = vit.run(tokens, [given, joining], READS)
    for name in READS:
        close(paused[name], beforehand[name])
    assert shown[0].shape == (BATCH, WIDTH)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_added_to_weights_counts_in_values_and_gradients(kind):
    vit, name = double_vit(kind), "blocks.1.attention.in.weight"
    tokens, prompt = random_tokens(vit), TokenPrompt(random(DEPTH, 2, WIDTH), tuple(range(DEPTH)))
    change = 0.1 * random(*vit.weights[name].shape, seed=7)
    change.requires_grad_()
    found = vit.with_added({name: change}).run(tokens, [prompt])["cls"]
    summed = dataclasses.replace(vit, weights=vit.weights | {name: vit.weights[name] + change})
    expected = naive_run(summed, tokens, [prompt])[0]["cls"]
    close(found, expected)
    ours, theirs = (torch.autograd.grad(cls[:, 0].sum(), change)[0] for cls in (found, expected))
    assert theirs.abs().max() > 1e-6
    close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rotary", "pooled"])
def test_a_compiled_block_gives_the_same(kind):
    torch._dynamo.reset()
    vit = double_vit(kind)
    compiled = dataclasses.replace(vit, block=CompiledBlock("eager"))
    tokens, prompt = random_tokens(vit), TokenPrompt(random(DEPTH, 2, WIDTH), tuple(range(DEPTH)))
    close(compiled.run(tokens, [prompt])["cls"], vit.run(tokens, [prompt])["cls"])


@pytest.mark.parametrize("kind", ["rotary", "pooled"])
def test_bfloat16_and_autocast_are_near_single_precision(kind):
    vit = random_vit(SHAPES[kind], seed=1)
    images = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    expected = vit.run(vit.embed(images))["cls"]
    low = random_vit(SHAPES[kind], seed=1, dtype=torch.bfloat16)
    for other in (vit.autocasting(), low):
        found = other.run(other.embed(images))["cls"].float()
        assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()
