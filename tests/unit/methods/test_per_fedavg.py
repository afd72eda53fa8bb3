"""Per-FedAvg against a naive first-order meta-learner, and where it must reduce to something known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import NaiveVPT, naive_vit
from support import experiment, local_tensors, run, shared_tensors, worst_difference
from torch import Tensor

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import step_loss
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import World
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.methods.per_fedavg import OneByOne, PerFedAvg
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import stream
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

METHOD = {"name": "per_fedavg", "prompt_tokens": 2}
LR, HEAD_LR = 0.2, 0.5
TRAIN = {"lr": LR, "lrs": {"head.*": HEAD_LR}, "momentum": 0.0, "batch_size": 8}
RATES = {"prompt": LR, "head.weight": HEAD_LR, "head.bias": HEAD_LR}


@pytest.fixture
def plain(settings: Any) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        changes.setdefault("method", METHOD)
        return settings(train={**TRAIN, **changes.pop("train", {})}, **changes)

    return make


def runtime_of(values: dict[str, Any]) -> tuple[World, ClientRuntime]:
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )
    states = ClientStates(lambda client: None)
    return world, ClientRuntime(made.config, world, made.method, bank, states, source.domain_names)


def orders(purpose: str, round: int, client: int, size: int, epochs: int, batch: int = 8) -> Iterator[Tensor]:
    generator = stream(0, round, client, purpose)
    for _ in range(epochs):
        yield from generator.permutation(size).split(batch)


@pytest.mark.parametrize("head", ["local", "shared"])
@pytest.mark.parametrize("epochs", [1, 2], ids=["odd", "even"])
def test_two_rounds_equal_a_naive_first_order_meta_learner(plain: Any, tmp_path: Path, head: str, epochs: int) -> None:
    """Own forward (transformers), own gradient, own update; 20 images in batches of 8 are 3 steps an epoch."""
    vit = naive_vit(width=32, depth=3, heads=2, mlp=64, patch=4, image=16, seed=0)
    vit.save_pretrained(tmp_path / "vit")
    half = (0.5, 0.5, 0.5)
    values = plain(
        backbone={"name": str(tmp_path / "vit"), "mean": list(half), "std": list(half)},
        method={**METHOD, "head": head, "inner_ratio": 0.7, "prompt_init": "random"},
        train={"epochs": epochs},
        federation={"rounds": 2, "fraction": 0.5, "evaluate_every": 2, "evaluate_last": 0},
    )
    made = experiment(values)
    source, manifest, _, world = made.factory.prepare()
    store, model = ImageStore(source, 16, "squash", made.factory.cache), NaiveVPT(vit)
    start = {**world.roles.shared, **world.roles.local}
    common, heads = dict(start), {client: {name: start[name] for name in NAMES} for client in range(4)}
    steps = 0
    for round in (1, 2):
        results = []
        for client in sample_cohort(0, round, range(4), 0.5):
            indices = manifest.clients[client].train
            images = normalise(store.pixels(indices), half, half, torch.float32, torch.device("cpu"))
            labels = torch.from_numpy(source.labels[indices])

            def gradient(at: Tensors, positions: Tensor, images: Tensor = images, labels: Tensor = labels) -> Tensors:
                leaves = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
                features = model.cls(images[positions], leaves["prompt"])
                logits = features @ leaves["head.weight"].T + leaves["head.bias"]
                torch.nn.functional.cross_entropy(logits, labels[positions]).backward()
                return {name: leaf.grad for name, leaf in leaves.items()}  # type: ignore[misc]

            theta = {**common, **heads[client]} if head == "local" else dict(common)
            batches = list(orders("batches.local", round, client, len(indices), epochs))
            steps = len(batches)
            for first, second in zip(batches[0::2], batches[1::2], strict=False):
                inner = gradient(theta, first)
                ahead = {name: tensor - 0.7 * RATES[name] * inner[name] for name, tensor in theta.items()}
                outer = gradient(ahead, second)
                theta = {name: tensor - RATES[name] * outer[name] for name, tensor in theta.items()}
            heads[client] = {name: theta[name] for name in NAMES}
            results.append((len(indices), theta))
        total = sum(size for size, _ in results)
        common = {name: sum(size / total * own[name] for size, own in results) for name in start}  # type: ignore[misc]
    assert steps % 2 == epochs % 2
    done = run(values)
    found = shared_tensors(done)
    assert set(found) == ({"prompt", *NAMES} if head == "shared" else {"prompt"})
    assert (common["prompt"] - start["prompt"]).abs().max() > 1e-4
    assert worst_difference(found, {name: common[name] for name in found}) < 1e-5
    if head == "local":
        client = done.rounds()[-1].cohort[0]
        assert worst_difference(local_tensors(done, client), heads[client]) < 1e-5


def test_without_a_look_ahead_it_is_plain_sgd_on_every_second_batch(plain: Any) -> None:
    values = plain(
        method={**METHOD, "inner_ratio": 0.0},
        partition={"scheme": "iid", "clients": 1},
        train={"epochs": 1, "batch_size": 15},
        federation={"rounds": 3},
    )
    world, runtime = runtime_of(values)
    images, fedvpt = runtime.bank.images(0, "train"), FedVPTDeep(prompt_tokens=2)
    params = dict(world.roles.shared)
    for round in (1, 2, 3):
        batches = list(orders("batches.local", round, 0, len(images), 1, batch=15))
        assert len(batches) > 3
        for positions in batches[1::2]:
            params = sgd(fedvpt, world, params, images, positions, 1.0)
    assert worst_difference(shared_tensors(run(values)), params) < 1e-6


def sgd(method: FedVPTDeep, world: World, params: Tensors, images: Any, positions: Tensor, scale: float) -> Tensors:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    loss = step_loss(method, world, leaves, images, positions, {})
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {name: params[name] - scale * RATES[name] * g for name, g in zip(leaves, grads, strict=True)}


def test_golden_values_of_a_pair_on_a_parabola() -> None:
    """f = a/2 theta^2 with a = 2, theta = 1, beta = 0.1, alpha = 0.05: theta' = 0.9, then theta = 1 - 0.1 * 2 * 0.9."""
    method, world = PerFedAvg(inner_ratio=0.5), World(1, 1, 1, 1, ("a",), ("b",))
    params = {"x": torch.tensor(1.0), "start.x": torch.tensor(1.0)}
    expected = [0.9, 0.82, 0.738, 0.6724]
    for step, value in enumerate(expected):
        stepped = {"x": params["x"] - 0.1 * 2 * params["x"]}
        params = {**params, **method.after_step(world, stepped, params, step)}
        assert float(params["x"]) == pytest.approx(value, abs=1e-6)
    assert float(params["start.x"]) == pytest.approx(0.6724, abs=1e-6)


@pytest.mark.parametrize("head", ["local", "shared"])
def test_a_single_step_has_no_partner_and_leaves_everything_as_it_was(plain: Any, head: str) -> None:
    values = plain(method={**METHOD, "head": head}, train={"batch_size": 64}, federation={"rounds": 1})
    world, _ = runtime_of(values)
    done = run(values)
    assert worst_difference(shared_tensors(done), world.roles.shared) == 0.0
    assert worst_difference(local_tensors(done, 0), world.roles.local) == 0.0


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_an_evaluation_comes_after_the_asked_steps_of_size_alpha(plain: Any, steps: int, ratio: float) -> None:
    """5 steps are more than the 3 batches of an epoch."""
    method = {**METHOD, "inner_ratio": ratio, "adaptation_steps": steps}
    world, runtime = runtime_of(plain(method=method))
    images, fedvpt = runtime.bank.images(1, "train"), FedVPTDeep(prompt_tokens=2)
    received = dict(world.roles.shared)
    params = dict(received)
    batches = list(orders("adaptation.batches.adaptation", 1, 1, len(images), max(steps, 1)))
    for positions in batches[:steps]:
        params = sgd(fedvpt, world, params, images, positions, ratio)
    test = runtime.bank.images(1, "test")
    expected = step_loss(fedvpt, world, params, test, torch.arange(len(test)), {}).item()
    found = runtime.evaluate(1, 1, received).nll / len(test)
    assert found == pytest.approx(expected, abs=1e-5)
    assert (found == pytest.approx(math.log(5), abs=1e-4)) == (steps == 0), "zero heads know nothing"


def test_evaluation_after_local_training_sees_its_pairs_and_forgets_the_look_ahead(plain: Any) -> None:
    def nll(point: str, batch_size: int) -> float:
        values = plain(
            name=f"{point}{batch_size}",
            train={"batch_size": batch_size},
            federation={"rounds": 1, "evaluate_at": point},
        )
        return float(run(values).summary()["nll"])

    assert nll("after_local", 64) == nll("personalised", 64), "a single step is a look-ahead only"
    assert nll("after_local", 8) != nll("personalised", 8)


def test_heads_of_newcomers_and_before_evaluations_take_plain_steps(plain: Any) -> None:
    values = plain(method={**METHOD, "head": "shared_then_finetune", "inner_ratio": 0.5, "finetune_epochs": 3})
    world, runtime = runtime_of(values)
    method, train = runtime.method, runtime.config.train
    for stages, epochs in ((method.adaptation(world, train), 3), (method.newcomer(world, train, 4), 4)):
        adapt, tune = stages
        assert (adapt.steps, adapt.trainable) == (1, ("prompt", *NAMES))
        assert (tune.epochs, tune.trainable) == (epochs, NAMES)
        before, stepped = {"x": torch.tensor(1.0)}, {"x": torch.tensor(3.0)}
        for step in (0, 1):
            assert tune.step.after_step(world, stepped, before, step) == stepped
            assert adapt.step.after_step(world, stepped, before, step) == {"x": torch.tensor(2.0)}
    assert method.prompts(world, world.roles.shared, None, {}).tokens[0].blocks == (0, 1, 2)  # type: ignore[arg-type]
    assert isinstance(stages[0].step, OneByOne)


def test_held_out_clients_adapt_and_tune_the_head(plain: Any) -> None:
    def nll(epochs: int) -> float:
        federation = {"rounds": 2, "held_out": 0.5, "newcomer_epochs": epochs}
        return float(run(plain(name=f"n{epochs}", train={"lr": 0.02}, federation=federation)).summary()["nll"])

    assert nll(3) != nll(0)


def test_meta_learning_differs_from_fedvpt(plain: Any) -> None:
    fedvpt = {"name": "fedvpt_deep", "prompt_tokens": 2, "head": "shared"}
    assert (
        worst_difference(shared_tensors(run(plain(name="a"))), shared_tensors(run(plain(name="b", method=fedvpt))))
        > 1e-3
    )


@pytest.mark.parametrize(("field", "value"), [("momentum", 0.9), ("weight_decay", 0.001)])
def test_optimisers_that_carry_something_across_a_pair_are_refused(plain: Any, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{field} must be 0 with method per_fedavg, got {value}"):
        run(plain(train={field: value}))


def test_a_depth_beyond_the_backbone_is_refused(plain: Any) -> None:
    with pytest.raises(ConfigError, match=r"method\.depth must be at most the 3 blocks of the backbone, got 4"):
        run(plain(method={**METHOD, "depth": 4}))
