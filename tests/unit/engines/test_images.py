"""Features of a client's images by name, kept or computed again, whole or in part."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support import experiment
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.data.transforms import ImageStore, normalise
from fedprompt.engines import images as module
from fedprompt.engines.images import ImageBank, Images
from fedprompt.errors import ContractError

pytestmark = pytest.mark.unit

NAMES = ["cls", "cls:1", "cls:2", "cls:3", "patches", "block_inputs", "block_inputs:1", "block_inputs:2"]
POSITIONS = torch.tensor([4, 0, 11, 4])


def images_of(settings: Any, stem: int = 0) -> Images:
    made = experiment(settings(backbone={"stem": stem}))
    source, manifest, backbone, _ = made.prepare()
    images = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.cache), backbone).images(1, "train")
    images.cached.clear()  # features outlive their bank
    return images


def embedded(images: Images, positions: Tensor) -> Tensor:
    backbone = images.backbone
    pixels = images.store.pixels(images.indices[positions.numpy()])
    return backbone.embed(normalise(pixels, backbone.mean, backbone.std, backbone.dtype, backbone.device))


def expected(name: str, backbone: ViT, tokens: Tensor) -> Tensor:
    """What `Method.needs` says about each name, block by block."""
    kind, _, count = name.partition(":")
    inputs = backbone.block_inputs(tokens)
    if kind == "block_inputs":
        return torch.stack(inputs[: int(count or len(inputs))], dim=1)
    if kind == "cls" and count and int(count) < backbone.depth:
        weight, bias = backbone.weights["norm.weight"], backbone.weights["norm.bias"]
        row = inputs[int(count)][:, 0]
        return torch.nn.functional.layer_norm(row, row.shape[-1:], weight, bias, backbone.shape.norm_eps)
    return backbone.run(tokens, reads=(kind,))[kind]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("name", NAMES)
def test_features_are_what_their_name_says(
    settings: Any, monkeypatch: pytest.MonkeyPatch, name: str, kept: bool
) -> None:
    if not kept:
        monkeypatch.setattr(module, "KEPT_BYTES", 0)
    images = images_of(settings)
    found = images.features(name, POSITIONS)
    wanted = expected(name, images.backbone, embedded(images, POSITIONS))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (name in images.cached) == kept
    assert not found.requires_grad


@pytest.mark.parametrize("stem", [0, 1])
@pytest.mark.parametrize("name", ["cls", "cls:2", "patches", "block_inputs:2"])
def test_keeping_features_changes_no_value(
    settings: Any, monkeypatch: pytest.MonkeyPatch, name: str, stem: int
) -> None:
    images = images_of(settings, stem)
    kept, tokens = images.features(name, POSITIONS), images.tokens(POSITIONS)
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    images.cached.clear()
    torch.testing.assert_close(images.features(name, POSITIONS), kept, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(images.tokens(POSITIONS), tokens, atol=1e-6, rtol=1e-6)
    assert not images.cached


def test_what_is_kept_is_decided_by_the_size_for_all_clients(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(settings)
    size = 32 * 4 * images.everybodys  # of "cls"
    assert images.everybodys > 2 * len(images)
    monkeypatch.setattr(module, "KEPT_BYTES", size)
    images.features("cls", POSITIONS)
    images.features("patches", POSITIONS)
    assert set(images.cached) == {"cls"}
    images.cached.clear()
    monkeypatch.setattr(module, "KEPT_BYTES", size - 1)
    images.features("cls", POSITIONS)
    assert not images.cached


def test_features_that_are_kept_are_computed_once(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(settings)
    first = images.features("cls:2", POSITIONS)
    monkeypatch.setattr(ViT, "embed", None)
    assert torch.equal(images.features("cls:2", POSITIONS), first)


@pytest.mark.parametrize(
    "name",
    ["", "words", "prompts", "cls:0", "cls:4", "cls:-1", "cls:x", "cls:", "cls:1:2", "patches:2", "block_inputs:4"],
)
def test_names_that_say_nothing_are_refused(settings: Any, name: str) -> None:
    with pytest.raises(ContractError, match=r"needs must name known features of blocks 1\.\.3, got") as error:
        images_of(settings).features(name, POSITIONS)
    assert repr(name) in str(error.value)


def test_blocks_of_features_are_counted_behind_the_stem(settings: Any) -> None:
    whole, behind = images_of(settings), images_of(settings, stem=1)
    torch.testing.assert_close(
        behind.features("cls:1", POSITIONS), whole.features("cls:2", POSITIONS), atol=1e-6, rtol=1e-6
    )
    inputs = behind.features("block_inputs", POSITIONS)
    torch.testing.assert_close(inputs, whole.features("block_inputs", POSITIONS)[:, 1:], atol=1e-6, rtol=1e-6)
    with pytest.raises(ContractError, match=r"blocks 1\.\.2, got 'cls:3'"):
        behind.features("cls:3", POSITIONS)


@pytest.mark.parametrize("stem", [0, 1])
def test_tokens_are_the_embedded_images(settings: Any, stem: int) -> None:
    images = images_of(settings, stem)
    torch.testing.assert_close(images.tokens(POSITIONS), embedded(images, POSITIONS), atol=1e-6, rtol=1e-6)
    assert bool(images.cached) == bool(stem), "only what a stem computed is worth keeping"


# parts of a client's images


def order_of(images: Images, seed: int = 0) -> Tensor:
    return torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stem", [0, 1])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed again"])
def test_a_part_sees_the_images_of_its_positions(
    settings: Any, monkeypatch: pytest.MonkeyPatch, kept: bool, stem: int
) -> None:
    if not kept:
        monkeypatch.setattr(module, "KEPT_BYTES", 0)
    images = images_of(settings, stem)
    order = order_of(images)
    part = images.part(0.25, 0.75, order)
    chosen = order[len(images) // 4 : 3 * len(images) // 4]
    assert len(part) == len(chosen) == len(images) // 2
    assert torch.equal(part.labels, images.labels[chosen])
    assert (part.indices == images.indices[chosen.numpy()]).all()
    assert (part.domains == images.domains[chosen.numpy()]).all()
    positions = torch.tensor([3, 0, 5])
    torch.testing.assert_close(part.tokens(positions), embedded(images, chosen[positions]), atol=1e-6, rtol=1e-6)
    for name in ("cls", "block_inputs:2"):
        found = part.features(name, positions)
        torch.testing.assert_close(found, images.features(name, chosen[positions]), atol=1e-6, rtol=1e-6)
        assert not part.cached, "features are kept once, for the whole"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 20])
@pytest.mark.parametrize("cuts", [(0.0, 0.5, 1.0), (0.0, 0.3, 0.7, 1.0), (0.0, 0.2, 1.0)])
def test_neighbouring_parts_cover_everything_once_and_none_is_empty(
    settings: Any, size: int, cuts: tuple[float, ...]
) -> None:
    everything = images_of(settings)
    images = everything.part(0, size / len(everything), torch.arange(len(everything)))
    assert len(images) == size
    order = order_of(images)
    parts = [images.part(start, end, order).indices for start, end in pairwise(cuts)]
    assert all(len(part) for part in parts)
    together = np.concatenate(parts)
    assert set(together) == set(images.indices)
    if size >= 5:
        assert len(together) == size, "no image is in two parts"
    assert (images.part(0.0, 1.0, order).indices == images.indices[order.numpy()]).all()
