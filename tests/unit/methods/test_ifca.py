"""IFCA: the choice of a set, the average inside a set, and FedVPT when there is only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import experiment, local_tensors, run, server_tensors, shared_tensors, worst_difference

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import step_loss
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Client, Server, Upload, World
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.methods.ifca import IFCA
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import stream
from fedprompt.tensors import Tensors, prefixed, stripped

pytestmark = pytest.mark.unit

SEVERAL = {"name": "ifca", "prompt_tokens": 2, "clusters": 3}


def runtime_of(values: dict[str, Any]) -> tuple[World, IFCA, ClientRuntime]:
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )
    states = ClientStates(lambda client: None)
    assert isinstance(made.method, IFCA)
    return world, made.method, ClientRuntime(made.config, world, made.method, bank, states, source.domain_names)


def with_random_heads(server: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tensor.shape, generator=generator) if "head" in name else tensor
        for name, tensor in server.items()
    }


def fake_client(loss: Callable[[Tensors], float], index: int = 0, round: int = 1) -> Client:
    counts = torch.zeros(5, dtype=torch.int64)
    return Client(index, str(index), round, 1, counts, loss, lambda purpose: stream(0, round, index, purpose))


@pytest.mark.parametrize("head", ["local", "shared", "shared_then_finetune"])
@pytest.mark.parametrize("point", ["personalised", "after_local"])
def test_one_cluster_is_fedvpt(settings: Any, head: str, point: str) -> None:
    federation = {"rounds": 2, "fraction": 0.5, "evaluate_at": point}
    common = {"prompt_tokens": 2, "head": head}
    alone = run(settings(name="a", method={"name": "ifca", "clusters": 1, **common}, federation=federation))
    plain = run(settings(name="b", method={"name": "fedvpt_deep", **common}, federation=federation))
    found = {name: tensor[0] for name, tensor in stripped("clusters.", server_tensors(alone)).items()}
    assert worst_difference(found, shared_tensors(plain)) < 1e-7
    assert alone.summary()["nll"] == pytest.approx(plain.summary()["nll"], abs=1e-7)
    if head == "local":
        client = plain.rounds()[-1].cohort[0]
        assert worst_difference(local_tensors(alone, client), local_tensors(plain, client)) < 1e-7


@pytest.mark.parametrize("head", ["local", "shared"])
def test_the_chosen_set_has_the_lowest_training_loss(settings: Any, head: str) -> None:
    world, method, runtime = runtime_of(settings(method={**SEVERAL, "head": head}))
    server = with_random_heads(world.roles.server)
    local = with_random_heads(world.roles.local)
    received = method.download(world, Server({}, server), 0)
    chosen = []
    for client in range(world.clients):
        images = runtime.bank.images(client, "train")
        losses = []
        for k in range(3):
            params = {**local, **{name: stacked[k] for name, stacked in stripped("clusters.", server).items()}}
            losses.append(step_loss(FedVPTDeep(), world, params, images, torch.arange(len(images)), {}).item())
        assert max(losses) - min(losses) > 1e-3
        for call in (method.begin, method.personalise):
            params = call(world, runtime._client(client, 1), received, local)
            best = losses.index(min(losses))
            assert params["cluster"].tolist() == [float(k == best) for k in range(3)]
            assert torch.equal(params["prompt"], server["clusters.prompt"][best])
            found = step_loss(method, world, params, images, torch.arange(len(images)), {}).item()
            assert found == pytest.approx(min(losses), abs=1e-6)
        chosen.append(losses.index(min(losses)))
    assert head == "local" or len(set(chosen)) > 1, "the seed must send clients to different sets"


def test_equal_losses_are_told_apart_by_a_draw_of_the_client_and_only_then(settings: Any) -> None:
    world, method, _ = runtime_of(settings(method=SEVERAL))
    received = method.download(world, Server({}, world.roles.server), 0)

    def choices(loss: Callable[[int], float]) -> list[int]:
        prompts = received["sent.prompt"]

        def of(params: Tensors) -> float:
            return loss(next(k for k in range(3) if torch.equal(params["prompt"], prompts[k])))

        begun = [method.begin(world, fake_client(of, index), received, {}) for index in range(30)]
        return [int(params["cluster"].argmax()) for params in begun]

    assert set(choices(lambda k: 1.6)) == {0, 1, 2}
    assert set(choices(lambda k: [1.0, 2.0, 1.0][k])) == {0, 2}
    assert set(choices(lambda k: [1.0, 0.999999, 1.0][k])) == {1}
    assert choices(lambda k: 1.6) == choices(lambda k: 1.6)


def test_zero_heads_tie_in_the_first_round_and_clients_spread(settings: Any) -> None:
    world, method, runtime = runtime_of(settings(method=SEVERAL, partition={"scheme": "iid", "clients": 8}))
    received = method.download(world, Server({}, world.roles.server), 0)
    picks = [method.begin(world, runtime._client(client, 1), received, {})["cluster"] for client in range(8)]
    assert (torch.stack(picks).sum(0) > 0).all()


def test_sets_start_from_different_prompts_and_equal_starts_are_refused(settings: Any) -> None:
    world, _, _ = runtime_of(settings(method=SEVERAL))
    first, second, third = world.roles.server["clusters.prompt"]
    assert min(float((a - b).abs().max()) for a, b in ((first, second), (second, third), (first, third))) > 1e-2
    rule = r"method\.prompt_init must not be zero with several clusters, which would be equal, got 'zero'"
    with pytest.raises(ConfigError, match=rule):
        run(settings(method={**SEVERAL, "prompt_init": "zero"}))
    run(settings(method={**SEVERAL, "clusters": 1, "prompt_init": "zero"}, federation={"rounds": 1}))


def test_a_depth_beyond_the_backbone_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"method\.depth must be at most the 3 blocks of the backbone, got 4"):
        run(settings(method={**SEVERAL, "depth": 4}))


def uploads(world: World, choices: list[int], weights: list[float]) -> list[Upload]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for client, (chosen, weight) in enumerate(zip(choices, weights, strict=True)):
        tensors = {name: torch.randn(s.shape, generator=generator) for name, s in world.roles.stat.items()}
        made.append(Upload(client, {**tensors, "cluster": torch.eye(3)[chosen]}, weight))
    return made


def test_each_set_is_the_mean_of_its_members_and_an_empty_one_stays(settings: Any) -> None:
    world, method, _ = runtime_of(settings(method=SEVERAL))
    before = with_random_heads(world.roles.server)
    sent = uploads(world, [0, 2, 2, 2], [0.1, 0.2, 0.7, 0.0])
    after = method.aggregate(world, Server({}, before), sent, weighted_mean).own
    backwards = method.aggregate(world, Server({}, before), sent[::-1], weighted_mean).own
    assert worst_difference(after, backwards) < 1e-6
    for name in ("prompt", *NAMES):
        first, second, third, _ = (upload.tensors[f"update.{name}"] for upload in sent)
        found = after[f"clusters.{name}"]
        torch.testing.assert_close(found[0], first)
        assert torch.equal(found[1], before[f"clusters.{name}"][1])
        torch.testing.assert_close(found[2], (2 * second + 7 * third) / 9)


def test_a_set_whose_only_member_has_no_images_stays(settings: Any) -> None:
    world, method, _ = runtime_of(settings(method=SEVERAL))
    before = world.roles.server
    after = method.aggregate(world, Server({}, before), uploads(world, [0, 1], [1.0, 0.0]), weighted_mean).own
    assert torch.equal(after["clusters.prompt"][1], before["clusters.prompt"][1])
    assert not torch.equal(after["clusters.prompt"][0], before["clusters.prompt"][0])


def test_averaging_unchanged_sets_changes_nothing(settings: Any) -> None:
    done = run(settings(method=SEVERAL, train={"lr": 0.0}))
    start = runtime_of(settings(method=SEVERAL))[0].roles.server
    assert worst_difference(server_tensors(done), start) < 1e-7


@pytest.mark.parametrize("head", ["local", "shared"])
def test_what_travels_is_all_sets_down_and_one_up(settings: Any, head: str) -> None:
    values = settings(method={**SEVERAL, "head": head}, federation={"rounds": 1})
    world, method, runtime = runtime_of(values)
    received = method.download(world, Server({}, world.roles.server), 0)
    names = {"prompt", *NAMES} if head == "shared" else {"prompt"}
    assert set(received) == {f"sent.{name}" for name in names}
    upload = runtime.train(1, 0, received).upload
    assert set(upload) == {"cluster", *(f"update.{name}" for name in names)}
    assert not world.roles.shared
    assert set(world.roles.local) == {"prompt", *NAMES} - names
    one = 3 * 2 * 32 + (5 * 33 if head == "shared" else 0)
    record = run(values).rounds()[1]
    assert (record.bytes_down, record.bytes_up) == (4 * 4 * 3 * one, 4 * 4 * (one + 3))


def test_three_rounds_equal_a_loop_written_out(settings: Any) -> None:
    rate, rounds, clusters = 0.3, 3, 2
    values = settings(
        method={**SEVERAL, "clusters": clusters},
        train={"lr": rate, "momentum": 0.0},
        federation={"rounds": rounds, "fraction": 0.75},
    )
    world, _, runtime = runtime_of(values)
    plain = FedVPTDeep(prompt_tokens=2, head="shared")
    sets = [{name: stacked[k] for name, stacked in stripped("clusters.", world.roles.server).items()} for k in (0, 1)]
    visited = set()
    for round in range(1, rounds + 1):
        joined: list[list[tuple[int, Tensors]]] = [[], []]
        for client in sample_cohort(0, round, range(world.clients), 0.75):
            images = runtime.bank.images(client, "train")
            losses = [step_loss(plain, world, each, images, torch.arange(len(images)), {}).item() for each in sets]
            tie = stream(0, round, client, "cluster").integer(2)
            chosen = tie if losses[0] == losses[1] else int(losses[1] < losses[0])
            visited.add(chosen)
            params = sets[chosen]
            generator = stream(0, round, client, "batches.local")
            for positions in generator.permutation(len(images)).split(8):
                leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
                loss = step_loss(plain, world, leaves, images, positions, {})
                grads = torch.autograd.grad(loss, list(leaves.values()))
                params = {name: params[name] - rate * g for name, g in zip(leaves, grads, strict=True)}
            joined[chosen].append((len(images), params))
        for k, members in enumerate(joined):
            total = sum(size for size, _ in members)
            if members:
                sets[k] = {name: sum(size / total * own[name] for size, own in members) for name in sets[k]}  # type: ignore[misc]
    assert visited == {0, 1}
    expected = prefixed("clusters.", {name: torch.stack([each[name] for each in sets]) for name in sets[0]})
    assert worst_difference(server_tensors(run(values)), expected) < 1e-6
    assert worst_difference(expected, world.roles.server) > 1e-2


@pytest.mark.parametrize("head", ["local", "shared"])
def test_held_out_clients_choose_a_set_and_tune_the_head(settings: Any, head: str) -> None:
    def nll(epochs: int) -> float:
        federation = {"rounds": 2, "held_out": 0.5, "newcomer_epochs": epochs}
        done = run(settings(name=f"n{epochs}", method={**SEVERAL, "head": head}, federation=federation))
        assert len(done.client_accuracies()) == 2
        return float(done.summary()["nll"])

    assert nll(5) < nll(0) - 1e-3


def test_variants_that_act_on_shared_tensors_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match="must be used with a method that shares tensors, got 'fedprox'"):
        run(settings(method=SEVERAL, variant={"name": "fedprox"}))
