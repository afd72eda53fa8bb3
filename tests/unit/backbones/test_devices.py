"""Nothing of a backbone stays behind on another device.

The device "meta" holds shapes without numbers and refuses to be mixed with a CPU tensor, so it stands in for a graphics card.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run, shared_tensors, worst_difference
from torch import Tensor

from fedprompt.backbones import load_backbone
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.text_tower import BidirectionalTower, TextTower
from fedprompt.backbones.vit import READS
from fedprompt.config import BackboneConfig
from fedprompt.modules.contexts import Position
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

NAMES = ["cat", "old boat", "ox"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no graphics card")


def moved(towers: DualEncoder, device: str) -> DualEncoder:
    def there(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in weights.items()}

    def tower(text: TextTower) -> TextTower:
        into = object.__new__(Projection)  # its own check reads numbers
        object.__setattr__(into, "weights", there(text.projection.weights))
        return dataclasses.replace(text, weights=there(text.weights), projection=into)

    image = object.__new__(Projection)
    object.__setattr__(image, "weights", there(towers.image_projection.weights))
    return dataclasses.replace(towers, weights=there(towers.weights), text=tower(towers.text), image_projection=image)


@pytest.fixture
def elsewhere(tmp_path: Path) -> DualEncoder:
    towers = load_backbone(BackboneConfig(name="tiny-clip"), tmp_path)
    assert isinstance(towers, DualEncoder)
    return moved(towers, "meta")


@pytest.mark.parametrize("per_sample", [False, True])
def test_images_with_prompts_and_their_gradients_stay_on_the_device(elsewhere: DualEncoder, per_sample: bool) -> None:
    images = torch.zeros(2, 3, 16, 16)  # the engine hands over what it decoded
    tokens = elsewhere.embed(images)
    lead = (2,) if per_sample else ()
    prompts = torch.zeros(*lead, 3, 2, 32, device="meta", requires_grad=True)
    late = TokenPrompt(torch.zeros(1, 1, 32, device="meta"), (2,))
    seen = elsewhere.run(
        tokens,
        [TokenPrompt(prompts, (0, 1, 2))],
        (*READS, "image", "image_patches"),
        pause=(2, lambda cls: [late]),
    )
    loss = torch.stack([value.sum() for value in seen.values()]).sum()
    (gradient,) = torch.autograd.grad(loss, prompts)
    assert {value.device.type for value in (tokens, *seen.values(), gradient)} == {"meta"}
    assert [rows.device.type for rows in elsewhere.block_inputs(tokens)] == ["meta"] * 3


@pytest.mark.parametrize("position", ["end", "middle", "front"])
@pytest.mark.parametrize("per_class", [False, True])
def test_texts_and_their_gradients_stay_on_the_device(
    elsewhere: DualEncoder, position: Position, per_class: bool
) -> None:
    size = (len(NAMES), 4, 32) if per_class else (4, 32)
    context = torch.zeros(size, device="meta", requires_grad=True)
    features = elsewhere.encode_classes(context, NAMES, position)
    (gradient,) = torch.autograd.grad(features.sum(), context)
    assert features.shape == (len(NAMES), elsewhere.features)
    assert features.device.type == gradient.device.type == "meta"


def test_a_bidirectional_tower_stays_on_the_device(elsewhere: DualEncoder) -> None:
    causal = elsewhere.text
    weights = dict(causal.weights)
    for part in ("weight", "bias"):
        weights[f"embedding_norm.{part}"] = weights.pop(f"norm.{part}")
    tower = BidirectionalTower(causal.shape, weights, causal.tokenise, causal.start, causal.end, causal.projection)
    context = torch.zeros(1, 4, 32, device="meta")
    assert tower.encode(context, tower.names(NAMES)).device.type == "meta"


@needs_cuda
@pytest.mark.parametrize("method", ["fedvpt", "promptfl"])
def test_a_run_on_a_graphics_card_equals_one_without(settings: Callable[..., dict[str, Any]], method: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        backbone = {"name": "tiny-clip" if method == "promptfl" else "tiny", "device": device}
        found.append(shared_tensors(run(settings(name=device, method={"name": method}, backbone=backbone))))
    assert worst_difference(*found) < 1e-4


@needs_cuda
def test_autocast_on_a_graphics_card_stays_close(tmp_path: Path) -> None:
    plain, autocast = (
        load_backbone(BackboneConfig(name="tiny", device="cuda", autocast=on), tmp_path) for on in (False, True)
    )
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found, expected = (vit.run(vit.embed(images))["cls"] for vit in (autocast, plain))
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.999
