"""FedVPT and FedVPT-D against an independent naive implementation, and what must follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import NaiveVPT, naive_local_training
from support import experiment, local_tensors, run, shared_tensors, worst_difference

from fedprompt.client.step import step_loss
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.features.image_bank import ImageBank
from fedprompt.random_streams import stream

pytestmark = pytest.mark.unit

BATCH, EPOCHS, LR, MOMENTUM, DECAY = 8, 2, 0.05, 0.9, 1e-3


@pytest.fixture
def vit_settings(settings: Any, folder: Path) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        backbone = {"name": str(folder), "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
        train = {"lr": LR, "batch_size": BATCH, "epochs": EPOCHS, "momentum": MOMENTUM, "weight_decay": DECAY}
        return settings(backbone=backbone, train=train, **changes)

    return make


def orders(seed: int, round: int, client: int, size: int) -> Iterator[torch.Tensor]:
    generator = stream(seed, round, client, "batches.local")
    for _ in range(EPOCHS):
        yield from generator.permutation(size).split(BATCH)


@pytest.mark.parametrize("method", ["fedvpt", "fedvpt_deep"])
@pytest.mark.parametrize("head", ["local", "shared"])
def test_two_rounds_equal_the_naive_implementation(vit_settings: Any, folder: Path, method: str, head: str) -> None:
    from transformers import ViTModel

    values = vit_settings(
        method={"name": method, "head": head, "prompt_tokens": 3}, federation={"rounds": 2, "fraction": 0.5}
    )
    made = experiment(values)
    source, manifest, _, world = made.factory.prepare()
    done = run(values)

    naive = NaiveVPT(ViTModel.from_pretrained(folder, add_pooling_layer=False).eval())
    store = ImageStore(source, 16, "squash", made.factory.cache)
    start = {**world.roles.shared, **world.roles.local}
    prompt, weight, bias = start["prompt"], start["head.weight"], start["head.bias"]
    heads = dict.fromkeys(range(world.clients), (weight, bias))
    for round in (1, 2):
        cohort = sample_cohort(0, round, range(world.clients), 0.5)
        results = []
        for client in cohort:
            indices = manifest.clients[client].train
            images = normalise(store.pixels(indices), (0.5,) * 3, (0.5,) * 3, torch.float32, torch.device("cpu"))
            labels = torch.from_numpy(source.labels[indices])
            own = heads[client] if head == "local" else (weight, bias)
            batches = list(orders(0, round, client, len(indices)))
            trained = naive_local_training(naive, images, labels, prompt, *own, batches, LR, MOMENTUM, DECAY)
            results.append((len(indices), trained))
            heads[client] = trained[1:]
        total = sum(size for size, _ in results)
        prompt = sum(size / total * trained[0] for size, trained in results)
        if head == "shared":
            weight = sum(size / total * trained[1] for size, trained in results)
            bias = sum(size / total * trained[2] for size, trained in results)
    found = shared_tensors(done)
    moved = (prompt - start["prompt"]).abs().max()
    assert moved > 1e-3, "training must have moved the prompts"
    torch.testing.assert_close(found["prompt"], prompt, atol=1e-5, rtol=1e-5)
    if head == "shared":
        torch.testing.assert_close(found["head.weight"], weight, atol=1e-5, rtol=1e-5)
    else:
        client = cohort[0]
        torch.testing.assert_close(local_tensors(done, client)["head.weight"], heads[client][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["fedvpt", "fedvpt_deep"])
def test_the_gradient_of_a_step_equals_the_naive_one(vit_settings: Any, folder: Path, method: str) -> None:
    from transformers import ViTModel

    made = experiment(vit_settings(method={"name": method, "prompt_tokens": 3}))
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone)
    images = bank.images(0, "train")
    params = {name: t.clone() for name, t in {**world.roles.shared, **world.roles.local}.items()}
    params["head.weight"] = torch.randn(params["head.weight"].shape, generator=torch.Generator().manual_seed(1))
    params = {name: tensor.requires_grad_() for name, tensor in params.items()}
    positions = torch.arange(10)
    loss = step_loss(made.method, world, params, images, positions, {})
    found = torch.autograd.grad(loss, list(params.values()))

    naive = NaiveVPT(ViTModel.from_pretrained(folder, add_pooling_layer=False).eval())
    pixels = normalise(
        images.store.pixels(images.indices[:10]), (0.5,) * 3, (0.5,) * 3, torch.float32, torch.device("cpu")
    )
    logits = naive.cls(pixels, params["prompt"]) @ params["head.weight"].T + params["head.bias"]
    expected_loss = torch.nn.functional.cross_entropy(logits, images.labels[:10])
    expected = torch.autograd.grad(expected_loss, list(params.values()))
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-5)
    for name, one, other in zip(params, found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_without_prompt_tokens_the_features_are_those_of_transformers(vit_settings: Any, folder: Path) -> None:
    from transformers import ViTModel

    made = experiment(vit_settings(method={"name": "fedvpt_deep", "prompt_tokens": 0}))
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone)
    tokens = bank.images(0, "train").tokens(torch.arange(5))
    given = made.method.prompts(world, world.roles.shared, None, {})  # type: ignore[arg-type]
    vit = ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()
    images = normalise(
        bank.images(0, "train").store.pixels(manifest.clients[0].train[:5]),
        (0.5,) * 3,
        (0.5,) * 3,
        torch.float32,
        torch.device("cpu"),
    )
    with torch.no_grad():
        expected = vit(images).last_hidden_state[:, 0]
    torch.testing.assert_close(backbone.run(tokens, given.tokens)["cls"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["fedvpt", "fedvpt_deep", "head_tune"])
def test_a_federation_of_one_client_is_centralised_training_bit_for_bit(settings: Any, method: str) -> None:
    """R rounds of one epoch on one client equal one uninterrupted loop over the same batches."""
    values = settings(
        method={"name": method, "head": "shared"},
        partition={"scheme": "iid", "clients": 1},
        federation={"rounds": 3},
        train={"momentum": 0.0},
    )
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone)
    images = bank.images(0, "train")
    params = dict(world.roles.shared)
    for round in (1, 2, 3):
        generator = stream(0, round, 0, "batches.local")
        for positions in generator.permutation(len(images)).split(8):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
            loss = step_loss(made.method, world, leaves, images, positions, {})
            grads = torch.autograd.grad(loss, list(leaves.values()))
            params = {
                name: (params[name] - 0.05 * (g + 0.0 * params[name])) for name, g in zip(leaves, grads, strict=True)
            }
    assert worst_difference(shared_tensors(run(values)), params) == 0.0


def test_shallow_prompts_are_deep_prompts_of_depth_one(settings: Any) -> None:
    shallow = run(settings(name="a", method={"name": "fedvpt", "prompt_tokens": 3}))
    deep = run(settings(name="b", method={"name": "fedvpt_deep", "prompt_tokens": 3, "depth": 1}))
    assert worst_difference(shared_tensors(shallow), shared_tensors(deep)) == 0.0


def test_local_only_shares_nothing_and_head_shared_shares_only_the_head(settings: Any) -> None:
    alone = run(settings(name="a", method={"name": "local"}))
    assert shared_tensors(alone) == {}
    assert sum(record.bytes_up + record.bytes_down for record in alone.rounds()) == 0
    with_head = run(settings(name="b", method={"name": "local", "head": "shared"}))
    assert set(shared_tensors(with_head)) == {"head.weight", "head.bias"}


def test_local_only_on_one_client_is_fedvpt(settings: Any) -> None:
    one = {"scheme": "iid", "clients": 1}
    alone = run(settings(name="a", method={"name": "local"}, partition=one))
    together = run(settings(name="b", method={"name": "fedvpt"}, partition=one))
    assert torch.equal(local_tensors(alone, 0)["prompt"], shared_tensors(together)["prompt"])


def test_a_depth_beyond_the_backbone_is_refused(settings: Any) -> None:
    from fedprompt.errors import ConfigError

    with pytest.raises(ConfigError, match=r"method\.depth must be at most the 3 blocks of the backbone, got 4"):
        run(settings(method={"name": "fedvpt_deep", "depth": 4}))


def test_the_upload_of_fedvpt_is_its_prompts(settings: Any) -> None:
    done = run(settings(method={"name": "fedvpt", "prompt_tokens": 5}, federation={"rounds": 1}))
    assert done.rounds()[1].bytes_up == 4 * 5 * 32 * 4  # clients x tokens x width x bytes
