"""Features of a client's images by name, kept or computed again, whole or in part."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support import experiment
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ContractError
from fedprompt.features.feature_rows import MEMORY
from fedprompt.features.image_bank import CommonImages, ImageBank, Images

pytestmark = pytest.mark.unit

NAMES = ["cls", "cls:1", "cls:2", "cls:3", "patches", "block_inputs", "block_inputs:1", "block_inputs:2"]
POSITIONS = torch.tensor([4, 0, 11, 4])
NOWHERE = {"memory_gib": 0, "disk_gib": 0}


@pytest.fixture(autouse=True)
def _nothing_from_other_tests() -> None:
    MEMORY.clear()


def bank_of(settings: Any, stem: int = 0, backbone: str = "tiny", **changes: Any) -> ImageBank:
    made = experiment(settings(backbone={"name": backbone, "stem": stem}, **changes))
    return made.factory.bank(*made.factory.prepare()[:3])


def images_of(settings: Any, stem: int = 0, **changes: Any) -> Images:
    return bank_of(settings, stem, **changes).images(1, "train")


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


@pytest.mark.parametrize("engine", [{}, NOWHERE], ids=["kept", "computed again"])
@pytest.mark.parametrize("stem", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_features_are_what_their_name_says(settings: Any, name: str, stem: int, engine: Any) -> None:
    if stem and name == "cls:3":
        pytest.skip("there are two blocks behind the stem")
    images = images_of(settings, stem, engine=engine)
    for _ in range(2):
        found = images.features(name, POSITIONS)
        wanted = expected(name, images.backbone, embedded(images, POSITIONS))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        assert not found.requires_grad


@pytest.mark.parametrize("engine", [{}, NOWHERE], ids=["kept", "computed again"])
@pytest.mark.parametrize("name", ["image", "image_patches", "cls", "patches"])
def test_features_of_a_dual_encoder_are_what_their_name_says(settings: Any, name: str, engine: Any) -> None:
    images = images_of(settings, engine=engine, backbone="tiny-clip")
    wanted = images.backbone.run(embedded(images, POSITIONS), reads=(name,))[name]
    torch.testing.assert_close(images.features(name, POSITIONS), wanted, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("engine", [{}, NOWHERE], ids=["kept", "computed again"])
@pytest.mark.parametrize("stem", [0, 1])
def test_tokens_are_the_inputs_of_a_block(settings: Any, stem: int, engine: Any) -> None:
    images = images_of(settings, stem, engine=engine)
    inputs = images.backbone.block_inputs(embedded(images, POSITIONS))
    torch.testing.assert_close(images.tokens(POSITIONS), inputs[0], atol=1e-6, rtol=1e-6)
    for start, wanted in enumerate(inputs):
        torch.testing.assert_close(images.tokens(POSITIONS, start), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", [-1, 3])
def test_tokens_of_no_block_are_refused(settings: Any, start: int) -> None:
    with pytest.raises(ContractError, match=rf"start must be in 0\.\.2, got {start}"):
        images_of(settings).tokens(POSITIONS, start)


def test_no_images_have_no_features(settings: Any) -> None:
    for engine in ({}, {"memory_gib": 0}, NOWHERE):
        images = images_of(settings, engine=engine)
        nothing = torch.tensor([], dtype=torch.long)
        assert images.features("patches", nothing).shape == (0, 16, 32)
        assert images.tokens(nothing).shape == (0, 17, 32)


def test_the_bank_gives_the_images_of_all_clients_by_their_numbers(settings: Any) -> None:
    bank = bank_of(settings)
    first, second = bank.images(0, "train"), bank.images(3, "test")
    mixed = torch.from_numpy(np.concatenate([second.indices[[2, 0, 2]], first.indices[[5]]]))
    for name in ("cls", "block_inputs:2"):
        wanted = [second.features(name, torch.tensor([2, 0, 2])), first.features(name, torch.tensor([5]))]
        assert torch.equal(bank.features(name, mixed), torch.cat(wanted))
    wanted = [second.tokens(torch.tensor([2, 0, 2]), 1), first.tokens(torch.tensor([5]), 1)]
    assert torch.equal(bank.tokens(mixed, 1), torch.cat(wanted))


def test_every_client_has_its_own_labels_and_domains(settings: Any) -> None:
    made = experiment(settings())
    source, manifest, backbone, _ = made.factory.prepare()
    bank = made.factory.bank(source, manifest, backbone)
    for number, client in enumerate(manifest.clients):
        for part, indices in (("train", client.train), ("test", client.test)):
            images = bank.images(number, part)
            assert images.indices.tolist() == indices.tolist()
            assert images.labels.tolist() == source.labels[indices].tolist()
            assert images.domains.tolist() == source.domains[indices].tolist()
            assert len(images) == bank.sizes(part)[number] == len(indices)
    assert bank.backbone is backbone


def test_common_images_are_the_same_for_every_client(settings: Any) -> None:
    made = experiment(settings())
    source, _, backbone, _ = made.factory.prepare()
    indices = np.array([300, 2, 77])
    store = ImageStore(source, 16, "squash", made.factory.cache)
    bank = CommonImages.of(source, indices, store, backbone, made.config.engine)
    for client in (0, 5):
        images = bank.images(client, "test")
        assert images.indices.tolist() == indices.tolist()
        assert torch.equal(images.features("cls", torch.arange(3)), bank.features("cls", torch.from_numpy(indices)))


# parts of a client's images


def order_of(images: Images, seed: int = 0) -> Tensor:
    return torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stem", [0, 1])
@pytest.mark.parametrize("engine", [{}, NOWHERE], ids=["kept", "computed again"])
def test_a_part_sees_the_images_of_its_positions(settings: Any, engine: Any, stem: int) -> None:
    images = images_of(settings, stem, engine=engine)
    order = order_of(images)
    part = images.part(0.25, 0.75, order)
    chosen = order[len(images) // 4 : 3 * len(images) // 4]
    assert len(part) == len(chosen) == len(images) // 2
    assert torch.equal(part.labels, images.labels[chosen])
    assert (part.indices == images.indices[chosen.numpy()]).all()
    assert (part.domains == images.domains[chosen.numpy()]).all()
    positions = torch.tensor([3, 0, 5])
    assert torch.equal(part.tokens(positions), images.tokens(chosen[positions]))
    for name in ("cls", "block_inputs:2"):
        assert torch.equal(part.features(name, positions), images.features(name, chosen[positions]))


def test_labels_can_be_replaced_and_survive_a_part(settings: Any) -> None:
    images = images_of(settings)
    flipped = replace(images, labels=4 - images.labels)
    order = order_of(images)
    assert torch.equal(flipped.part(0.0, 0.5, order).labels, 4 - images.labels[order[: len(images) // 2]])
    assert torch.equal(flipped.features("cls", POSITIONS), images.features("cls", POSITIONS))


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
