"""Picking prompts from a pool: the reduction to FedVPT, a naive implementation that goes image by image, and what must follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import NaiveVPT, naive_vit
from support import experiment, local_tensors, run, shared_tensors
from torch import Tensor

from fedprompt.client.step import forward, make_batch, step_loss
from fedprompt.core.method import Batch, Seen, World
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.methods.fedins import FedIns
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

GREY = (0.5, 0.5, 0.5)


class Bench:
    """One experiment laid open, with heads that are not zero."""

    def __init__(self, values: dict[str, Any], method: FedIns) -> None:
        made = experiment(values, method)
        source, manifest, self.backbone, self.world = made.factory.prepare()
        self.method, self.train = method, made.config.train
        store = ImageStore(source, self.backbone.shape.image_size, "squash", made.factory.cache)
        self.images = ImageBank(source, manifest, store, self.backbone).images(0, "train")
        self.params = {**self.world.roles.shared, **self.world.roles.local}
        generator = torch.Generator().manual_seed(1)
        for name in method.head_names:
            self.params[name] = torch.randn(self.params[name].shape, generator=generator)

    def queries(self, positions: Tensor) -> Tensor:
        return make_batch(self.method, self.images, positions, training=False).features["cls"]

    def logits(self, params: Tensors, positions: Tensor) -> Tensor:
        batch = make_batch(self.method, self.images, positions, training=True)
        seen = forward(self.method, self.world, params, self.images, positions, batch, {})
        return self.method.logits(self.world, params, seen, batch, {})

    def gradients(self, params: Tensors, positions: Tensor) -> tuple[Tensor, Tensors]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
        loss = step_loss(self.method, self.world, leaves, self.images, positions, {})
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return loss.detach(), dict(zip(leaves, found, strict=True))


def small(**changes: Any) -> FedIns:
    return FedIns(**{"pool": 6, "picks": 2, "prompt_tokens": 2, **changes})


@pytest.mark.parametrize(
    ("head", "depth", "pool_heads"), [("shared", 1, True), ("local", None, True), ("shared", None, False)]
)
def test_a_pool_of_one_set_without_a_key_loss_is_fedvpt(
    settings: Any, head: Any, depth: int | None, pool_heads: bool
) -> None:
    method = small(pool=1, picks=1, depth=depth, head=head, pool_heads=pool_heads, key_weight=0.0)
    values = {"federation": {"rounds": 2, "fraction": 0.5}}
    pooled = run(settings(name="pooled", **values), method)
    plain = run(settings(name="plain", **values), FedVPT(head=head, depth=depth, prompt_tokens=2))
    found, expected = shared_tensors(pooled), shared_tensors(plain)
    torch.testing.assert_close(found["pool.prompts"][0], expected["prompt"], atol=1e-6, rtol=1e-5)
    start = experiment(settings(name="start"), method).factory.prepare()[3].roles.shared
    assert (found["pool.prompts"] - start["pool.prompts"]).abs().max() > 1e-4, "training must have moved the prompts"
    assert torch.equal(found["pool.keys"], start["pool.keys"])
    if head == "local":
        client = plain.rounds()[-1].cohort[0]
        found, expected = local_tensors(pooled, client), local_tensors(plain, client)
    weight = found["pool.head.weight"][0] if pool_heads else found["head.weight"]
    torch.testing.assert_close(weight, expected["head.weight"], atol=1e-6, rtol=1e-5)
    assert pooled.client_accuracies() == plain.client_accuracies()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit")
    naive_vit(width=32, depth=3, heads=2, mlp=64, patch=4, image=16, seed=0).save_pretrained(path)
    return path


@pytest.mark.parametrize(("pool_heads", "similarity"), [(True, "sum"), (False, "mean")])
def test_loss_and_gradients_equal_a_loop_over_images(
    settings: Any, folder: Path, pool_heads: bool, similarity: Any
) -> None:
    from transformers import ViTModel

    method = small(pool_heads=pool_heads, similarity=similarity, key_weight=0.3, depth=2)
    values = settings(seed=1, backbone={"name": str(folder), "mean": list(GREY), "std": list(GREY)})
    bench, size = Bench(values, method), 7
    loss, found = bench.gradients(bench.params, torch.arange(size))

    naive = NaiveVPT(ViTModel.from_pretrained(folder, add_pooling_layer=False).eval())
    pixels = normalise(
        bench.images.store.pixels(bench.images.indices[:size]), GREY, GREY, torch.float32, torch.device("cpu")
    )
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in bench.params.items()}
    losses, picked = [], set()
    for image, label in zip(pixels, bench.images.labels[:size], strict=True):
        with torch.no_grad():
            query = naive.vit(image[None]).last_hidden_state[0, 0]
        cosines = [torch.cosine_similarity(query, key, dim=0) for key in leaves["pool.keys"]]
        best = sorted(range(6), key=lambda index: -cosines[index].item())[:2]
        picked.add(tuple(best))
        prompt = (leaves["pool.prompts"][best[0]] + leaves["pool.prompts"][best[1]]) / 2
        feature = naive.cls(image[None], prompt)[0]
        if pool_heads:
            weights, biases = leaves["pool.head.weight"], leaves["pool.head.bias"]
            logits = sum(weights[index] @ feature + biases[index] for index in best) / 2
        else:
            logits = leaves["head.weight"] @ feature + leaves["head.bias"]
        likeness = cosines[best[0]] + cosines[best[1]]
        likeness = likeness if similarity == "sum" else likeness / 2
        losses.append(0.7 * torch.nn.functional.cross_entropy(logits, label) + 0.3 * (1 - likeness))
    assert len(picked) > 1, "images must differ in what they pick"
    expected_loss = torch.stack(losses).mean()
    expected = dict(zip(leaves, torch.autograd.grad(expected_loss, list(leaves.values())), strict=True))
    torch.testing.assert_close(loss, expected_loss.detach(), atol=1e-5, rtol=1e-5)
    for name in leaves:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_an_image_gets_the_same_alone_and_in_a_batch(settings: Any) -> None:
    bench, positions = Bench(settings(), small(picks=1)), torch.arange(6)
    params = {**bench.params, "pool.keys": bench.queries(positions)}  # every image has its own set
    together = bench.logits(params, positions)
    alone = torch.cat([bench.logits(params, positions[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    single = FedVPT(prompt_tokens=2, depth=None)
    for i in range(6):
        prompt = single.prompts(bench.world, {"prompt": params["pool.prompts"][i]}, None, {}).tokens  # type: ignore[arg-type]
        cls = bench.backbone.run(bench.images.tokens(positions[i : i + 1]), prompt)["cls"]
        expected = cls @ params["pool.head.weight"][i].T + params["pool.head.bias"][i]
        torch.testing.assert_close(together[i : i + 1], expected, atol=1e-5, rtol=1e-5)


def test_the_gradient_of_a_batch_is_the_mean_of_those_of_its_images(settings: Any) -> None:
    bench = Bench(settings(), small())
    loss, found = bench.gradients(bench.params, torch.arange(5))
    alone = [bench.gradients(bench.params, torch.tensor([i])) for i in range(5)]
    torch.testing.assert_close(loss, torch.stack([each for each, _ in alone]).mean(), atol=1e-5, rtol=1e-5)
    for name, gradient in found.items():
        mean = torch.stack([each[name] for _, each in alone]).mean(0)
        torch.testing.assert_close(gradient, mean, atol=1e-5, rtol=1e-4)


def test_picking_the_whole_pool_is_its_mean(settings: Any) -> None:
    bench, positions = Bench(settings(), small(pool=3, picks=3)), torch.arange(4)
    mean = {
        name: tensor if name == "pool.keys" else tensor.mean(0, keepdim=True).expand_as(tensor)
        for name, tensor in bench.params.items()
    }
    shuffled = {**mean, "pool.keys": torch.randn(3, 32, generator=torch.Generator().manual_seed(2))}
    whole = bench.logits({**bench.params, "pool.keys": shuffled["pool.keys"]}, positions)
    torch.testing.assert_close(whole, bench.logits(mean, positions), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole, bench.logits(shuffled, positions), atol=1e-4, rtol=1e-4)


def toy(method: FedIns) -> tuple[World, Tensors, Batch]:
    world = World(2, 3, 17, 4, ("a", "b"), ("one",))
    keys = torch.tensor([[1.0, 0.0], [0.0, 5.0], [-1.0, 0.0]])
    params = {"pool.keys": keys, "pool.prompts": torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 3, 1, 2)}
    return world, params, Batch(torch.tensor([0, 1]), {"cls": torch.tensor([[4.0, 3.0], [-30.0, 40.0]])})


def test_picks_weights_and_similarities_in_numbers() -> None:
    method = FedIns(pool=3, picks=2, prompt_tokens=1)
    world, params, batch = toy(method)
    given = method.prompts(world, params, batch, {})
    assert given.extra["weights"].tolist() == [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    torch.testing.assert_close(given.extra["similarity"], torch.tensor([0.8 + 0.6, 0.8 + 0.6]))
    assert given.tokens[0].tokens[:, 0, 0, 0].tolist() == [0.5, 1.5]
    assert given.tokens[0].blocks == (0, 1, 2)
    mean = replace(method, similarity="mean").prompts(world, params, batch, {})
    torch.testing.assert_close(mean.extra["similarity"], torch.tensor([0.7, 0.7]))
    longer = {**params, "pool.keys": params["pool.keys"] * torch.tensor([[9.0], [0.1], [3.0]])}
    assert torch.equal(method.prompts(world, longer, batch, {}).extra["weights"], given.extra["weights"])


def test_the_loss_weighs_cross_entropy_against_likeness_in_numbers() -> None:
    method = FedIns(pool=3, picks=2, prompt_tokens=1, key_weight=0.25)
    world, params, batch = toy(method)
    logits = torch.tensor([[3.0, 3.0], [0.0, 0.0]])  # cross-entropy log 2
    seen = Seen(torch.zeros(2, 2), extra=method.prompts(world, params, batch, {}).extra)
    expected = 0.75 * 0.693147 + 0.25 * (1 - 1.4)
    assert float(method.loss(world, params, logits, seen, batch, {})) == pytest.approx(expected, abs=1e-5)
    padded = replace(batch, weights=torch.tensor([1.0, 0.0]))
    seen = replace(seen, extra={**seen.extra, "similarity": torch.tensor([0.2, 50.0])})
    expected = 0.75 * 0.693147 + 0.25 * 0.8
    assert float(method.loss(world, params, logits, seen, padded, {})) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("key_weight", [0.0, 0.1])
def test_sets_that_nobody_picked_get_no_gradient_and_keys_learn_from_likeness_alone(
    settings: Any, key_weight: float
) -> None:
    bench, positions = Bench(settings(), small(picks=1, key_weight=key_weight)), torch.arange(2)
    params = {**bench.params}
    params["pool.keys"] = torch.cat([bench.queries(positions).roll(1, -1), bench.queries(positions), -torch.eye(2, 32)])
    _, found = bench.gradients(params, positions)
    weights = forward(
        bench.method,
        bench.world,
        params,
        bench.images,
        positions,
        make_batch(bench.method, bench.images, positions, True),
        {},
    ).extra["weights"]
    assert weights.argmax(-1).tolist() == [2, 3]
    for name, gradient in found.items():
        moved = gradient.flatten(1).abs().amax(1) > 1e-9
        assert not moved[[0, 1, 4, 5]].any(), name
        if name != "pool.keys":
            assert moved[[2, 3]].all(), name
    turned = {**params, "pool.keys": params["pool.keys"] + 0.1}
    pull = bench.gradients(turned, positions)[1]["pool.keys"]
    assert bool(pull.abs().max() > 1e-6) == (key_weight > 0)


def test_without_tokens_the_pool_of_heads_reads_the_plain_features(settings: Any) -> None:
    bench, positions = Bench(settings(), small(prompt_tokens=0, picks=6)), torch.arange(4)
    mean = {name: bench.params[name].mean(0) for name in bench.method.head_names}
    expected = bench.queries(positions) @ mean["pool.head.weight"].T + mean["pool.head.bias"]
    torch.testing.assert_close(bench.logits(bench.params, positions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pool_heads", [True, False])
@pytest.mark.parametrize("head", ["shared", "local", "shared_then_finetune"])
def test_heads_lie_where_the_policy_wants_them_and_newcomers_tune_them(
    settings: Any, head: Any, pool_heads: bool
) -> None:
    bench = Bench(settings(), small(head=head, pool_heads=pool_heads, finetune_epochs=2))
    names = ("pool.head.weight", "pool.head.bias") if pool_heads else ("head.weight", "head.bias")
    roles = bench.world.roles
    assert set(roles.shared) == {"pool.prompts", "pool.keys", *(names if head != "local" else ())}
    assert set(roles.local) == set(names if head == "local" else ())
    (newcomer,) = bench.method.newcomer(bench.world, bench.train, 3)
    assert (newcomer.trainable, newcomer.epochs) == (names, 3)
    adaptation = bench.method.adaptation(bench.world, bench.train)
    assert [(stage.trainable, stage.epochs) for stage in adaptation] == (
        [(names, 2)] if head == "shared_then_finetune" else []
    )


def test_a_newcomer_is_evaluated_with_its_own_copy_of_the_pool_of_heads(settings: Any) -> None:
    done = run(settings(federation={"rounds": 1, "held_out": 0.25, "newcomer_epochs": 2}), small())
    assert len(done.client_accuracies()) == 1
    again = run(settings(name="again", federation={"rounds": 1, "held_out": 0.25, "newcomer_epochs": 0}), small())
    for name, tensor in shared_tensors(done).items():
        assert torch.equal(tensor, shared_tensors(again)[name])


def test_the_whole_pool_goes_up(settings: Any) -> None:
    method = {"name": "fedins", "pool": 4, "prompt_tokens": 2, "depth": 1}
    record = run(settings(method=method, federation={"rounds": 1})).rounds()[1]
    one_set = 2 * 32 + 32 + 5 * 32 + 5  # tokens, key, head
    assert record.bytes_up == record.bytes_down == 4 * 4 * 4 * one_set  # clients x bytes x sets


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"picks": 26}, r"method\.picks must be at most the 25 sets of the pool, got 26"),
        ({"depth": 4}, r"method\.depth must be at most the 3 blocks of the backbone, got 4"),
        ({"key_weight": 1.1}, r"method\.key_weight"),
        ({"similarity": "max"}, r"method\.similarity"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(settings(method={"name": "fedins", **changes}))


# scales and shifts


def test_scales_and_shifts_of_an_image_are_the_mean_of_its_sets_in_its_own_transformer(settings: Any) -> None:
    bench, positions = Bench(settings(), FedIns(form="ssf", pool=6, picks=2)), torch.arange(5)
    logits = bench.logits(bench.params, positions)
    cosines = torch.nn.functional.cosine_similarity(
        bench.queries(positions)[:, None], bench.params["pool.keys"][None], dim=-1
    )
    for row, picked in enumerate(cosines.topk(2).indices):
        weights = dict(bench.backbone.weights)
        for name in bench.world.operations:
            scale, shift = bench.params[f"pool.ssf.{name}"][picked].mean(0)
            weight = weights[name + ".weight"]
            weights[name + ".weight"] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
            weights[name + ".bias"] = weights[name + ".bias"] * scale + shift
        own = replace(bench.backbone, weights=weights)
        pixels = normalise(
            bench.images.store.pixels(bench.images.indices[row : row + 1]),
            own.mean,
            own.std,
            torch.float32,
            torch.device("cpu"),
        )
        feature = own.run(own.embed(pixels))["cls"][0]
        heads, biases = bench.params["pool.head.weight"][picked], bench.params["pool.head.bias"][picked]
        expected = (heads @ feature + biases).mean(0)
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def test_every_operation_of_a_picked_set_learns_and_the_others_do_not(settings: Any) -> None:
    bench = Bench(settings(), FedIns(form="ssf", pool=4, picks=1, key_weight=0.0))
    _, found = bench.gradients(bench.params, torch.arange(6))
    cosines = bench.queries(torch.arange(6)) @ torch.nn.functional.normalize(bench.params["pool.keys"], dim=-1).T
    picked = set(cosines.argmax(-1).tolist())
    for name in bench.world.operations:
        moved = set(found[f"pool.ssf.{name}"].abs().amax((1, 2)).nonzero().flatten().tolist())
        assert moved == picked, name


def test_scales_start_near_one_and_shifts_near_zero(settings: Any) -> None:
    shared = Bench(settings(), FedIns(form="ssf")).world.roles.shared
    sets = torch.cat([tensor.flatten(2) for name, tensor in shared.items() if "ssf" in name], dim=-1)
    assert "pool.prompts" not in shared
    assert abs(float(sets[:, 0].mean()) - 1) < 0.002
    assert abs(float(sets[:, 1].mean())) < 0.002
    assert float(sets[:, 0].std()) == pytest.approx(0.02, rel=0.05)


def test_depth_limits_the_blocks_that_are_scaled(settings: Any) -> None:
    shared = Bench(settings(), FedIns(form="ssf", depth=1)).world.roles.shared
    blocks = {name.split(".")[3] for name in shared if name.startswith("pool.ssf.blocks")}
    assert blocks == {"0"}
    assert {"pool.ssf.patch", "pool.ssf.norm"} <= set(shared)
