"""The backbone as an object: its shape, its digest, and that nothing can train it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from fedprompt.backbones import catalog, load_backbone
from fedprompt.backbones.random_weights import TINY_SHAPE, random_vit
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, ContractError
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit


def test_tokens_count_cls_extra_and_patches():
    shape = dataclasses.replace(TINY_SHAPE, extra_tokens=4)
    assert (shape.grid, shape.patches, shape.tokens) == (4, 16, 21)


def test_digest_changes_when_one_value_changes():
    vit = random_vit()
    before = vit.digest()
    vit.weights["blocks.1.mlp.in.bias"][0] += 1e-3
    assert vit.digest() != before


def test_digest_tells_architectures_with_equal_weights_apart():
    vit = random_vit()
    assert dataclasses.replace(vit, shape=dataclasses.replace(vit.shape, heads=4)).digest() != vit.digest()


def test_digest_is_the_same_for_the_same_seed_and_another_for_another():
    assert random_vit(seed=1).digest() == random_vit(seed=1).digest() != random_vit(seed=2).digest()


def test_training_a_prompt_leaves_the_backbone_as_it_was():
    vit = random_vit()
    before = vit.digest()
    tokens = torch.zeros(1, 2, 32, requires_grad=True)
    optimiser = torch.optim.SGD([tokens], lr=1.0)
    vit.run(vit.embed(torch.randn(2, 3, 16, 16)), [TokenPrompt(tokens, (0,))])["cls"].square().sum().backward()
    optimiser.step()
    assert tokens.abs().max() > 0
    assert all(weight.grad is None for weight in vit.weights.values())
    vit.assert_frozen(before)


def test_a_changed_weight_is_an_error():
    vit = random_vit()
    before = vit.digest()
    vit.weights["norm.bias"][3] = 7
    with pytest.raises(BackboneError, match="must stay frozen, but its digest went from"):
        vit.assert_frozen(before)


def test_a_weight_that_asks_for_a_gradient_is_an_error():
    vit = random_vit()
    vit.weights["norm.bias"].requires_grad_()
    with pytest.raises(BackboneError, match=r"'norm\.bias' requires a gradient"):
        vit.assert_frozen(vit.digest())


def test_images_of_another_size_are_refused():
    with pytest.raises(ContractError, match=r"images must be \(B, 3, 16, 16\), got \(1, 3, 20, 20\)"):
        random_vit().embed(torch.zeros(1, 3, 20, 20))


def test_an_unlisted_block_input_is_refused():
    vit = random_vit()
    with pytest.raises(ContractError, match=r"blocks must be in 0\.\.2"):
        vit.block_inputs(vit.embed(torch.zeros(1, 3, 16, 16)), [3])


def test_block_inputs_come_in_the_order_asked_for():
    vit = random_vit()
    tokens = vit.embed(torch.randn(1, 3, 16, 16))
    everything = vit.block_inputs(tokens)
    second, first = vit.block_inputs(tokens, [2, 0])
    assert torch.equal(second, everything[2])
    assert torch.equal(first, tokens)


def test_an_input_norm_is_applied_where_a_family_has_one():
    vit = random_vit(dataclasses.replace(TINY_SHAPE, ln_pre=True))
    weights = vit.weights | {"ln_pre.weight": torch.ones(32), "ln_pre.bias": torch.zeros(32)}
    tokens = dataclasses.replace(vit, weights=weights).embed(torch.randn(2, 3, 16, 16))
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 17), rtol=0, atol=1e-5)
    torch.testing.assert_close(tokens.var(-1, unbiased=False), torch.ones(2, 17), rtol=0, atol=1e-3)


def test_tiny_is_built_in_milliseconds(tmp_path: Path):
    load_backbone(BackboneConfig(name="tiny"), tmp_path)
    start = time.perf_counter()
    load_backbone(BackboneConfig(name="tiny"), tmp_path)
    assert time.perf_counter() - start < 0.5


def test_tiny_features_differ_from_image_to_image(tmp_path: Path):
    vit = load_backbone(BackboneConfig(name="tiny"), tmp_path)
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert vit.run(vit.embed(images))["cls"].std(dim=0).mean() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_precision_is_the_one_asked_for(tmp_path: Path, dtype):
    vit = load_backbone(BackboneConfig(name="tiny", dtype=dtype), tmp_path)
    seen = vit.run(vit.embed(torch.randn(1, 3, 16, 16)))["cls"]
    assert seen.dtype == vit.dtype == getattr(torch, dtype)


def test_the_catalog_states_preprocessing_of_every_named_backbone():
    rows = {row["name"]: row for row in catalog()}
    assert rows["tiny"]["mean"] == (0.5, 0.5, 0.5)
    assert rows["dinov2-small"]["std"] == (0.229, 0.224, 0.225)
    assert rows["dinov2-small"]["image_size"] == 518
