"""Outputs that are scaled and shifted image by image, and pixels that are added: equal to changed weights and changed images."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from unit.backbones.test_sentence_encoder import embedded, tiny
from unit.backbones.test_vit_prompts import SHAPES, WIDTH, double_vit

from fedprompt.backbones.vit import READS, ViT
from fedprompt.errors import ContractError
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

BATCH = 3


def random(*size: int, seed: int = 3) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factors_of(vit: ViT) -> dict[str, Tensor]:
    """(B, 2, width) for every operation, each different."""
    start = torch.tensor([[1.0], [0.0]], dtype=vit.dtype)
    return {
        name: start + 0.3 * random(BATCH, 2, width, seed=number).to(vit.dtype)
        for number, (name, width) in enumerate(vit.operations.items())
    }


def merged(vit: ViT, factors: dict[str, Tensor], image: int) -> ViT:
    """The same transformer for one image: scale and shift are part of weight and bias."""
    weights = dict(vit.weights)
    for name, value in factors.items():
        place = vit._behind_stem(name)
        scale, shift = value[image]
        weight = weights[place + ".weight"]
        weights[place + ".weight"] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
        weights[place + ".bias"] = weights[place + ".bias"] * scale + shift
    return dataclasses.replace(vit, weights=weights)


@pytest.mark.parametrize("reads", [("cls",), READS])
@pytest.mark.parametrize("kind", SHAPES)
def test_every_image_runs_through_a_transformer_of_its_own(kind: str, reads: tuple[str, ...]) -> None:
    vit, images = double_vit(kind), random(BATCH, 3, 8, 8)
    factors = factors_of(vit)
    assert ("patch" in factors) == (not vit.shape.ln_pre)
    prompt = TokenPrompt(random(2, 2, WIDTH), (0, 1))
    found = vit.modulated(factors).run(vit.embed(images), [prompt], reads)
    for image in range(BATCH):
        own = merged(vit, factors, image)
        expected = own.run(own.embed(images[image : image + 1]), [prompt], reads)
        for name in reads:
            torch.testing.assert_close(found[name][image : image + 1], expected[name], rtol=0, atol=1e-10)


def test_samples_of_an_image_are_scaled_alike() -> None:
    vit, images = double_vit(next(iter(SHAPES))), random(BATCH, 3, 8, 8)
    factors, own = factors_of(vit), TokenPrompt(random(2 * BATCH, 1, 2, WIDTH), (1,))
    found = vit.modulated(factors).run(vit.embed(images), [own], repeat=2)["cls"]
    twice = {name: value.repeat_interleave(2, 0) for name, value in factors.items()}
    expected = vit.modulated(twice).run(vit.embed(images.repeat_interleave(2, 0)), [own])["cls"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_behind_a_stem_only_its_later_blocks_are_scaled() -> None:
    whole = double_vit(next(iter(SHAPES)))
    vit, images = dataclasses.replace(whole, stem=2), random(BATCH, 3, 8, 8)
    factors = factors_of(vit)
    assert "patch" not in factors
    found = vit.modulated(factors).run(vit.embed(images))["cls"]
    expected = [merged(vit, factors, i).run(vit.embed(images[i : i + 1]))["cls"] for i in range(BATCH)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-10)


def test_sentences_are_scaled_word_by_word_and_padding_stays_padding() -> None:
    encoder = tiny()
    factors = factors_of(encoder)
    found = encoder.modulated(factors).run(embedded(encoder), reads=("cls", "patches"))
    for row in range(BATCH):
        own = merged(encoder, factors, row)
        expected = own.run(embedded(encoder)[row : row + 1], reads=("cls", "patches"))
        for name in ("cls", "patches"):
            torch.testing.assert_close(found[name][row : row + 1], expected[name], rtol=1e-4, atol=1e-5)


def test_added_pixels_are_those_of_a_changed_image() -> None:
    vit, images = double_vit(next(iter(SHAPES))), random(4, 3, 8, 8)
    pixels = random(2, 3, 8, 8, seed=9)
    found = vit.modulated({"pixels": pixels}).run(vit.embed(images), reads=READS)
    changed = images + pixels.repeat_interleave(2, 0)
    expected = vit.run(vit.embed(changed), reads=READS)
    for name in READS:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


def test_pixels_need_patches_that_enter_block_0() -> None:
    vit = double_vit(next(iter(SHAPES)))
    assert vit.frame == 8
    assert dataclasses.replace(vit, stem=1).frame == 0
    assert tiny().frame == 0
    for kind in SHAPES:
        assert bool(double_vit(kind).frame) != double_vit(kind).shape.ln_pre


@pytest.mark.parametrize(
    ("name", "size", "complaint"),
    [
        ("pixels", (1, 3, 4, 4), "pixels must be"),
        ("blocks.0.norm3", (1, 2, WIDTH), "factors must fit an operation"),
        ("blocks.0.norm1", (1, WIDTH), "factors must fit an operation"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, size: tuple[int, ...], complaint: str) -> None:
    vit = double_vit(next(iter(SHAPES)))
    with pytest.raises(ContractError, match=complaint):
        vit.modulated({name: random(*size)})
