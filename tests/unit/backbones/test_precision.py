"""bfloat16: around the products of frozen matrices (autocast), or everywhere (dtype). How close it stays, and what it leaves alone.

A bfloat16 has 8 significant bits, so a product is off by up to 2**-9 = 0.2 % of its size. Such errors have no common sign: over a few
blocks they leave features within about one percent, that is a cosine above 0.999 with autocast, where sums and norms stay exact.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import run
from torch import Tensor

from fedprompt.backbones import load_backbone
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

DEPTH, WIDTH, BATCH, CLASSES = 6, 96, 64, 10
EXACT = random_vit(ViTShape(WIDTH, DEPTH, 4, 192, patch=4, image_size=16), seed=1)
SEEDS = torch.Generator().manual_seed(0)
IMAGES = torch.randn(BATCH, 3, 16, 16, generator=SEEDS)
PROMPTS = 0.3 * torch.randn(DEPTH, 4, WIDTH, generator=SEEDS)
HEAD = torch.randn(CLASSES, WIDTH, generator=SEEDS)
LABELS = torch.randint(CLASSES, (BATCH,), generator=SEEDS)


def half(vit: ViT) -> ViT:
    """All of it in bfloat16."""
    return random_vit(vit.shape, seed=1, dtype=torch.bfloat16)


def step(vit: ViT) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, logits, loss and the gradient of deep prompts."""
    prompts = PROMPTS.to(vit.dtype).requires_grad_()
    cls = vit.run(vit.embed(IMAGES), [TokenPrompt(prompts, tuple(range(DEPTH)))])["cls"]
    logits = cls.float() @ HEAD.T / WIDTH**0.5
    loss = F.cross_entropy(logits, LABELS)
    return cls.detach(), logits.detach(), loss.detach(), torch.autograd.grad(loss, prompts)[0].float()


@pytest.mark.parametrize(
    ("make", "likeness", "agreement"),
    [(ViT.autocasting, 0.999, 0.95), (half, 0.99, 0.9)],
    ids=["autocast", "bfloat16"],
)
def test_features_predictions_loss_and_gradients_stay_close(
    make: Callable[[ViT], ViT], likeness: float, agreement: float
) -> None:
    (features, logits, loss, gradient), expected = step(make(EXACT)), step(EXACT)
    assert not torch.equal(features.float(), expected[0])  # it did something
    assert F.cosine_similarity(features.float(), expected[0]).min() > likeness
    assert (logits.argmax(1) == expected[1].argmax(1)).float().mean() >= agreement
    torch.testing.assert_close(loss, expected[2], rtol=0.02, atol=0)
    assert F.cosine_similarity(gradient.flatten(1), expected[3].flatten(1)).min() > 0.98


def test_what_enters_and_leaves_an_autocast_backbone_is_float32() -> None:
    vit = EXACT.autocasting()
    tokens = vit.embed(IMAGES)
    seen = vit.run(tokens, [TokenPrompt(PROMPTS, tuple(range(DEPTH)))], ("cls", "patches", "prompts"))
    found = [tokens, *vit.block_inputs(tokens), vit.read_early(tokens, 2), *seen.values()]
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert vit.dtype == torch.float32


def test_a_method_that_is_called_in_a_pause_computes_in_full_precision() -> None:
    vit, seen = EXACT.autocasting(), []

    def later(cls: Tensor) -> list[TokenPrompt]:
        seen.append((torch.is_autocast_enabled("cpu"), cls.dtype))
        return []

    vit.run(vit.embed(IMAGES), pause=(2, later))
    assert seen == [(False, torch.float32)]


@pytest.mark.parametrize("name", ["tiny", "tiny-clip"])
def test_an_autocast_backbone_has_a_digest_of_its_own(tmp_path: Path, name: str) -> None:
    plain, autocast = (load_backbone(BackboneConfig(name=name, autocast=on), tmp_path) for on in (False, True))
    assert (plain.autocast, autocast.autocast) == (False, True)
    assert autocast.digest() != plain.digest()


def test_texts_stay_close_and_are_unit_vectors(tmp_path: Path) -> None:
    plain, autocast = (load_backbone(BackboneConfig(name="tiny-clip", autocast=on), tmp_path) for on in (False, True))
    assert isinstance(plain, DualEncoder)
    assert isinstance(autocast, DualEncoder)
    assert autocast.text.digest() != plain.text.digest()
    context = 0.2 * torch.randn(3, plain.text.shape.width, generator=torch.Generator().manual_seed(0))
    names = ["cat", "old boat", "ox"]
    found, expected = (towers.encode_classes(context, names) for towers in (autocast, plain))
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert F.cosine_similarity(found, expected).min() > 0.999
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(names)), rtol=0, atol=1e-6)
    images = IMAGES[:4]
    seen = autocast.run(autocast.embed(images), reads=("image",))["image"]
    torch.testing.assert_close(seen.norm(dim=1), torch.ones(4), rtol=0, atol=1e-6)


def test_added_weights_are_autocast_too() -> None:
    change = {"blocks.0.mlp.in.weight": 0.1 * torch.randn_like(EXACT.weights["blocks.0.mlp.in.weight"])}
    found, expected = (vit.with_added(change).run(vit.embed(IMAGES))["cls"] for vit in (EXACT.autocasting(), EXACT))
    assert not torch.equal(found, expected)
    assert F.cosine_similarity(found, expected).min() > 0.999


def test_autocast_of_double_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BackboneError, match=r"backbone\.autocast must be false where backbone\.dtype is float64, got True"
    ):
        load_backbone(BackboneConfig(name="tiny", dtype="float64", autocast=True), tmp_path)


@pytest.mark.parametrize("method", ["fedvpt", "promptfl"])
def test_a_run_with_autocast_learns_as_one_without(settings: Callable[..., dict[str, Any]], method: str) -> None:
    losses = []
    for on in (False, True):
        backbone = {"name": "tiny-clip" if method == "promptfl" else "tiny", "autocast": on}
        done = run(settings(name=f"autocast-{on}", method={"name": method}, backbone=backbone))
        losses.append([record.loss for record in done.rounds() if record.round])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_unit_vectors_in_bfloat16_have_length_one_to_the_rounding_of_their_entries() -> None:
    """Normalised in float32, only the entries are rounded, whose errors cancel; a norm in bfloat16 is off by up to 0.3 %."""
    drawn = torch.Generator().manual_seed(0)
    project = Projection({"linear.weight": torch.randn(384, 384, generator=drawn).div(20).bfloat16()})
    vectors = project(torch.randn(64, 384, generator=drawn).bfloat16())
    assert vectors.dtype == torch.bfloat16
    assert float((vectors.double().norm(dim=-1) - 1).abs().max()) < 1e-3
