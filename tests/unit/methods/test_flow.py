"""Flow: the router's two ends, the two halves, and what is thrown away, all against a naive image-by-image computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import NaiveVPT, naive_vit
from support import experiment, local_tensors, run, server_tensors, shared_tensors, trained_alone, worst_difference
from torch import Tensor
from transformers import ViTModel

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch, step_loss
from fedprompt.core.method import Batch, Server, World
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank, Images
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.methods.flow import Flow
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import stream
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

METHOD = {"name": "flow", "prompt_tokens": 2}
HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def plain(settings: Any) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        changes.setdefault("method", METHOD)
        return settings(train={"lr": 0.2, "momentum": 0.0, "epochs": 2, **changes.pop("train", {})}, **changes)

    return make


def runtime_of(values: dict[str, Any]) -> tuple[World, Flow, ClientRuntime]:
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )
    states = ClientStates(lambda client: None)
    assert isinstance(made.method, Flow)
    return world, made.method, ClientRuntime(made.config, world, made.method, bank, states, source.domain_names)


def lively(world: World) -> Tensors:
    """Parameters with nothing at zero, the local copy far from the shared prompt."""
    generator = torch.Generator().manual_seed(1)
    declared = {**world.roles.shared, **world.roles.local}
    declared["local_copy.prompt"] = declared["prompt"]
    return {name: 0.5 * torch.randn(tensor.shape, generator=generator) for name, tensor in declared.items()}


def decided(world: World, images: Images) -> Tensors:
    """The same with a router that sends the images different ways."""
    params = lively(world)
    cls = images.features("cls", torch.arange(10))
    params["router.weight"] = 20 * params["router.weight"]
    params["router.bias"] = -(torch.nn.functional.layer_norm(cls, (32,)) @ params["router.weight"].T).mean(0)
    return params


def logits_of(method: FedVPTDeep, world: World, params: Tensors, images: Images, training: bool = False) -> Tensor:
    positions = torch.arange(10)
    batch = make_batch(method, images, positions, training=training)
    return method.logits(world, params, forward(method, world, params, images, positions, batch, {}), batch, {})


@pytest.mark.parametrize("routing", ["soft", "hard"])
@pytest.mark.parametrize("per_block", [True, False])
@pytest.mark.parametrize(("bias", "used"), [(-1e4, "prompt"), (1e4, "local_copy.prompt")])
def test_a_saturated_router_is_fedvpt_with_one_of_the_prompts(
    plain: Any, routing: str, per_block: bool, bias: float, used: str
) -> None:
    world, method, runtime = runtime_of(plain(method={**METHOD, "routing": routing, "per_block": per_block}))
    params = lively(world)
    params["router.bias"] = torch.full_like(params["router.bias"], bias)
    images = runtime.bank.images(0, "train")
    expected = logits_of(FedVPTDeep(), world, {**params, "prompt": params[used]}, images)
    unused = "prompt" if used == "local_copy.prompt" else "local_copy.prompt"
    other = logits_of(FedVPTDeep(), world, {**params, "prompt": params[unused]}, images)
    assert (expected - other).abs().max() > 0.1
    torch.testing.assert_close(logits_of(method, world, params, images), expected, atol=1e-5, rtol=1e-5)


def test_hard_routing_takes_one_prompt_per_block_at_test_and_mixes_in_training(plain: Any) -> None:
    world, method, runtime = runtime_of(plain(method={**METHOD, "routing": "hard"}))
    images = runtime.bank.images(0, "train")
    params = decided(world, images)
    batch = make_batch(method, images, torch.arange(10), training=False)
    soft = replace(method, routing="soft").probability(params, batch)
    hard = method.probability(params, batch)
    assert torch.equal(hard, (soft > 0.5).float())
    assert 0 < float(hard.mean()) < 1, "the parameters must send images both ways"
    assert torch.equal(method.probability(params, replace(batch, training=True)), soft)
    tokens = method.prompts(world, params, batch, {}).tokens[0].tokens
    for image in range(10):
        for block in range(3):
            name = "local_copy.prompt" if soft[image, block] > 0.5 else "prompt"
            assert torch.equal(tokens[image, block], params[name][block])
    undecided = {**params, "router.weight": torch.zeros(3, 32), "router.bias": torch.zeros(3)}
    assert torch.equal(method.probability(undecided, batch), torch.zeros(10, 3))


def test_the_router_starts_undecided_and_ignores_the_scale_of_the_features(plain: Any) -> None:
    world, method, runtime = runtime_of(plain())
    batch = make_batch(method, runtime.bank.images(0, "train"), torch.arange(10), training=True)
    assert torch.equal(method.probability(world.roles.shared, batch), torch.full((10, 3), 0.5))
    params = lively(world)
    larger = Batch(batch.labels, {"cls": 30 * batch.features["cls"] + 4})
    torch.testing.assert_close(method.probability(params, larger), method.probability(params, batch), atol=1e-3, rtol=0)


def test_one_probability_for_all_blocks_is_the_same_in_each(plain: Any) -> None:
    world, method, runtime = runtime_of(plain(method={**METHOD, "per_block": False}))
    assert world.roles.shared["router.weight"].shape == (1, 32)
    assert world.roles.shared["router.bias"].shape == (1,)
    params = lively(world)
    batch = make_batch(method, runtime.bank.images(0, "train"), torch.arange(10), training=True)
    spread = {
        **params,
        "router.weight": params["router.weight"].expand(3, 32),
        "router.bias": params["router.bias"].expand(3),
    }
    one, each = (
        made.prompts(world, own, batch, {}).tokens[0].tokens
        for made, own in ((method, params), (replace(method, per_block=True), spread))
    )
    assert one.shape == (10, 3, 2, 32)
    torch.testing.assert_close(one, each)


def test_every_image_is_routed_by_itself(plain: Any) -> None:
    world, method, runtime = runtime_of(plain())
    images = runtime.bank.images(0, "train")
    params = decided(world, images)
    routes = method.probability(params, make_batch(method, images, torch.arange(10), training=False))
    assert routes.std(0).min() > 0.05
    together = logits_of(method, world, params, images)
    for position in range(10):
        batch = make_batch(method, images, torch.tensor([position]), training=False)
        seen = forward(method, world, params, images, torch.tensor([position]), batch, {})
        alone = method.logits(world, params, seen, batch, {})
        torch.testing.assert_close(alone[0], together[position], atol=1e-5, rtol=1e-5)


class NaiveFlow:
    """One image at a time through `transformers`' layers; r written out."""

    def __init__(self, vit: ViTModel) -> None:
        self.vit, self.vpt = vit, NaiveVPT(vit)

    def loss(self, params: Tensors, pixels: Tensor, labels: Tensor, mixed: bool) -> Tensor:
        losses = []
        for image, label in zip(pixels, labels, strict=True):
            prompt = params["local_copy.prompt"]
            if mixed:
                with torch.no_grad():
                    cls = self.vit(image[None]).last_hidden_state[0, 0]
                z = (cls - cls.mean()) / (cls.var(unbiased=False) + 1e-5).sqrt()
                own = 1 / (1 + torch.exp(-(params["router.weight"] @ z + params["router.bias"])))
                prompt = torch.stack([own[b] * prompt[b] + (1 - own[b]) * params["prompt"][b] for b in range(3)])
            logits = params["head.weight"] @ self.vpt.cls(image[None], prompt)[0] + params["head.bias"]
            losses.append(torch.logsumexp(logits, 0) - logits[label])
        return torch.stack(losses).mean()


@pytest.fixture
def vit_settings(plain: Any, tmp_path: Path) -> Any:
    naive_vit(width=32, depth=3, heads=2, mlp=64, patch=4, image=16, seed=0).save_pretrained(tmp_path / "vit")

    def make(**changes: Any) -> dict[str, Any]:
        backbone = {"name": str(tmp_path / "vit"), "mean": list(HALF), "std": list(HALF)}
        return plain(backbone=backbone, **changes)

    return make


def pixels_of(images: Images) -> Tensor:
    return normalise(images.store.pixels(images.indices), HALF, HALF, torch.float32, torch.device("cpu"))


def test_loss_and_gradient_of_a_mixed_step_equal_the_naive_ones(vit_settings: Any, tmp_path: Path) -> None:
    world, method, runtime = runtime_of(vit_settings())
    images = runtime.bank.images(0, "train")
    params = {name: tensor.requires_grad_() for name, tensor in lively(world).items()}
    names = ("prompt", "router.weight", "router.bias", *NAMES)
    loss = step_loss(method, world, params, images, torch.arange(10), {})
    found = torch.autograd.grad(loss, [params[name] for name in names])
    naive = NaiveFlow(ViTModel.from_pretrained(tmp_path / "vit", add_pooling_layer=False).eval())
    expected_loss = naive.loss(params, pixels_of(images)[:10], images.labels[:10], mixed=True)
    expected = torch.autograd.grad(expected_loss, [params[name] for name in names])
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-5)
    for name, one, other in zip(names, found, expected, strict=True):
        assert other.abs().max() > 1e-5, name
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_the_router_learns_nothing_where_the_two_prompts_are_equal(plain: Any) -> None:
    world, method, runtime = runtime_of(plain())
    params = {name: tensor.requires_grad_() for name, tensor in lively(world).items()}
    params["local_copy.prompt"] = params["prompt"].detach().clone()
    loss = step_loss(method, world, params, runtime.bank.images(0, "train"), torch.arange(10), {})
    router, prompt = torch.autograd.grad(loss, [params["router.weight"], params["prompt"]])
    assert router.abs().max() < 1e-6 < prompt.abs().max()


def test_a_round_equals_a_naive_one(vit_settings: Any, tmp_path: Path) -> None:
    """Two clients; each half's batches in the order of its own stream, the halves from the client's fixed order."""
    values = vit_settings(
        partition={"scheme": "domains", "clients": 4},
        train={"epochs": 1, "lrs": {"router.*": 0.5}},
        federation={"rounds": 1, "fraction": 0.5},
    )
    world, _, runtime = runtime_of(values)
    done = run(values)
    naive = NaiveFlow(ViTModel.from_pretrained(tmp_path / "vit", add_pooling_layer=False).eval())
    results = []
    for client in done.rounds()[-1].cohort:
        images = runtime.bank.images(client, "train")
        pixels, labels, size = pixels_of(images), images.labels, len(images)
        order = stream(0, 0, client, "shares").permutation(size)
        params = {**world.roles.shared, "local_copy.prompt": world.roles.shared["prompt"]}
        halves = (
            ("local_copy", order[: size // 2], ("local_copy.prompt", *NAMES)),
            (
                "mixed",
                order[size // 2 :],
                ("prompt", "router.weight", "router.bias", *NAMES),
            ),
        )
        for stage, half, trainable in halves:
            shuffled = stream(0, 1, client, f"batches.{stage}").permutation(len(half))
            for positions in shuffled.split(8):
                leaves = {name: params[name].detach().requires_grad_() for name in trainable}
                rows = half[positions]
                loss = naive.loss({**params, **leaves}, pixels[rows], labels[rows], mixed=stage == "mixed")
                grads = torch.autograd.grad(loss, list(leaves.values()))
                for name, grad in zip(leaves, grads, strict=True):
                    params[name] = params[name] - (0.5 if "router" in name else 0.2) * grad
        results.append((size, params))
    total = sum(size for size, _ in results)
    found = shared_tensors(done)
    expected = {name: sum(size / total * own[name] for size, own in results) for name in found}  # type: ignore[misc]
    for name in found:
        assert (expected[name] - world.roles.shared[name]).abs().max() > 1e-6, name
    assert worst_difference(found, expected) < 1e-5


def test_each_stage_trains_its_own_tensors_on_its_own_half(plain: Any) -> None:
    """15 images, so that the middle one must not be in both halves."""
    world, method, runtime = runtime_of(plain(data={"train_per_cell": 3}))
    images = runtime.bank.images(0, "train")
    assert len(images) % 2 == 1
    first, second = method.stages(world, runtime.config.train)
    received = lively(world)
    del received["local_copy.prompt"]
    params = method.begin(world, runtime._client(0, 1), received, {})
    assert torch.equal(params["local_copy.prompt"], received["prompt"])
    halves = [runtime.training.share(images, stage, 0) for stage in (first, second)]
    assert sorted([*halves[0].indices, *halves[1].indices]) == sorted(images.indices)
    between, _ = trained_alone(runtime, [first], params, 1, 0, "")
    after, _ = trained_alone(runtime, [second], between, 1, 0, "")
    changed = [
        {name for name in params if not torch.equal(old[name], new[name])}
        for old, new in ((params, between), (between, after))
    ]
    assert changed == [
        {"local_copy.prompt", *NAMES},
        {"prompt", "router.weight", "router.bias", *NAMES},
    ]


@pytest.mark.parametrize("head", ["local", "shared"])
def test_the_local_copy_is_neither_sent_nor_kept(plain: Any, head: str) -> None:
    values = plain(method={**METHOD, "head": head})
    world, method, runtime = runtime_of(values)
    upload = runtime.train(1, 0, method.download(world, Server(world.roles.shared, {}), 0)).upload
    shared = {"prompt", "router.weight", "router.bias", *(NAMES if head == "shared" else ())}
    assert set(upload) == shared
    done = run(values)
    assert set(shared_tensors(done)) == shared
    assert server_tensors(done) == {}
    assert set(local_tensors(done, 0)) == (set() if head == "shared" else set(NAMES))
    assert done.rounds()[1].bytes_up == 4 * 4 * (3 * 2 * 32 + 3 * 33 + (5 * 33 if head == "shared" else 0))


@pytest.mark.parametrize("routing", ["soft", "hard"])
def test_an_evaluation_makes_the_local_copy_anew_on_the_first_half(plain: Any, routing: str) -> None:
    world, method, runtime = runtime_of(plain(method={**METHOD, "routing": routing}))
    received = lively(world)
    del received["local_copy.prompt"]
    images, test = runtime.bank.images(1, "train"), runtime.bank.images(1, "test")
    half = stream(0, 0, 1, "shares").permutation(len(images))[: len(images) // 2]
    generator = stream(0, 1, 1, "adaptation.batches.local_copy")
    tuned = {name: received[name] for name in ("prompt", *NAMES)}
    for _ in range(2):
        for positions in generator.permutation(len(half)).split(8):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in tuned.items()}
            loss = step_loss(FedVPTDeep(), world, leaves, images, half[positions], {})
            grads = torch.autograd.grad(loss, list(leaves.values()))
            tuned = {name: tuned[name] - 0.2 * g for name, g in zip(leaves, grads, strict=True)}
    params = {**received, **tuned, "prompt": received["prompt"], "local_copy.prompt": tuned["prompt"]}
    batch = make_batch(method, test, torch.arange(len(test)), training=False)
    seen = forward(method, world, params, test, torch.arange(len(test)), batch, {})
    expected = torch.nn.functional.cross_entropy(method.logits(world, params, seen, batch, {}), test.labels)
    found = runtime.evaluate(1, 1, received)
    assert found.nll / len(test) == pytest.approx(expected.item(), abs=1e-4)
    assert runtime.evaluate(1, 1, received) == found, "an evaluation keeps nothing"
    assert runtime.states.take_changes() == {}


def test_head_policies_and_newcomers_come_after_the_local_copy(plain: Any) -> None:
    world, method, runtime = runtime_of(plain(method={**METHOD, "head": "shared_then_finetune", "finetune_epochs": 3}))
    train = runtime.config.train
    for stages, epochs in ((method.adaptation(world, train), 3), (method.newcomer(world, train, 4), 4)):
        copying, tuning = stages
        assert (copying.trainable, copying.share) == (("local_copy.prompt", *NAMES), (0.0, 0.5))
        assert (tuning.trainable, tuning.epochs, tuning.share) == (NAMES, epochs, (0.0, 1.0))
    done = run(plain(method={**METHOD, "head": "local"}, federation={"rounds": 1, "held_out": 0.5}))
    assert len(done.client_accuracies()) == 2


def test_a_depth_beyond_the_backbone_is_refused(plain: Any) -> None:
    with pytest.raises(ConfigError, match=r"method\.depth must be at most the 3 blocks of the backbone, got 4"):
        run(plain(method={**METHOD, "depth": 4}))


def test_an_unknown_routing_is_refused(plain: Any) -> None:
    with pytest.raises(ConfigError, match=r"method\.routing must be .*'soft' or 'hard', got 'both'"):
        run(plain(method={**METHOD, "routing": "both"}))
