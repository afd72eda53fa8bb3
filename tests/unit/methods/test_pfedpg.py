"""pFedPG: the generator against torch's attention, the server's step against the chain rule, and whole runs against a naive loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import NaiveVPT, naive_local_training, naive_vit
from support import (
    experiment,
    fitting_stages,
    local_tensors,
    run,
    seeded,
    server_tensors,
    shared_tensors,
    trained_alone,
    worst_difference,
)
from torch import Tensor, nn

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import step_loss
from fedprompt.config import TrainConfig
from fedprompt.core import registry
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Client, Server, Upload, World
from fedprompt.core.roles import Roles
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.pfedpg import WEIGHTS, PFedPG, most_heads
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import Stream, stream
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

WIDTH, CLIENTS, TOKENS = 24, 4, 3


def world_of(method: PFedPG, dtype: torch.dtype = torch.float64, newcomers: Sequence[int] = ()) -> World:
    names = tuple(f"client{number}" for number in range(CLIENTS))
    world = World(WIDTH, 3, 17, 4, ("a", "b"), names, frozenset(newcomers), dtype=dtype)
    return replace(world, roles=method.init(world, seeded()))


def server_of(world: World) -> Server:
    return Server(world.roles.shared, world.roles.server)


def client_of(index: int) -> Client:
    name = f"client{index}"
    return Client(index, name, 1, 4, torch.tensor([2, 2]), lambda params: 0.0, lambda purpose: seeded())


def change_of(world: World, seed: int) -> Tensor:
    shape = world.roles.stat["prompt_change"].shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def aggregated(method: PFedPG, world: World, changes: dict[int, Tensor], weights: Sequence[float]) -> Server:
    uploads = [
        Upload(client, {"prompt_change": change}, weight)
        for (client, change), weight in zip(changes.items(), weights, strict=True)
    ]
    return method.aggregate(world, server_of(world), uploads, weighted_mean)


def naive_generate(tensors: Tensors, descriptor: Tensor, heads: int) -> Tensor:
    """torch's own attention, one block after the other."""
    width = len(descriptor)
    attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True, dtype=descriptor.dtype)
    query, key, value, output = (tensors[name] for name in WEIGHTS)
    weights = {"in_proj_weight": torch.cat([query.T, key.T, value.T]), "out_proj.weight": output.T}
    blocks = []
    for base in tensors["base"]:
        inputs = (descriptor.view(1, 1, -1), base.unsqueeze(0), base.unsqueeze(0))
        answer, _ = torch.func.functional_call(attention, weights, inputs, {"need_weights": False})
        blocks.append(base + answer[0])
    return torch.stack(blocks)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("heads", [1, 4, None])
def test_the_generator_is_a_multi_head_cross_attention_on_top_of_the_base(heads: int | None, depth: int) -> None:
    method = PFedPG(attention_heads=heads, depth=depth, prompt_tokens=TOKENS, descriptor_std=5.0)
    world = world_of(method)
    own = world.roles.server
    for client in range(CLIENTS):
        found = method.download(world, server_of(world), client)["prompt"]
        expected = naive_generate(own, own["descriptors"][client], heads or 12)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        assert float((found - own["base"]).abs().min()) > 0
    first, second = (method.generate(own, descriptor) for descriptor in own["descriptors"][:2])
    assert float((first - second).abs().max()) > 1e-3


def test_one_token_is_answered_with_itself_whatever_the_descriptor() -> None:
    """Golden: attention over one token has weight one, so P = b + b W_V W_O."""
    method = PFedPG(prompt_tokens=1)
    own = world_of(method).roles.server
    expected = own["base"] + own["base"] @ own["generator.value"] @ own["generator.output"]
    for descriptor in own["descriptors"]:
        torch.testing.assert_close(method.generate(own, descriptor), expected)


def test_what_the_generator_adds_to_blank_tokens_starts_at_a_tenth_of_what_it_adds_to_random_ones() -> None:
    blank, random = (
        world_of(PFedPG(prompt_tokens=TOKENS, prompt_init=kind)).roles.server for kind in ("blank", "random")
    )
    torch.testing.assert_close(blank["generator.output"], 0.1 * random["generator.output"])
    torch.testing.assert_close(blank["generator.value"], random["generator.value"])


@pytest.mark.parametrize(
    ("width", "heads"), [(768, 12), (384, 12), (192, 12), (32, 8), (40, 10), (24, 12), (13, 1), (7, 7)]
)
def test_the_default_number_of_heads_is_the_largest_divisor_up_to_twelve(width: int, heads: int) -> None:
    assert most_heads(width) == heads


@pytest.mark.parametrize("client", range(CLIENTS))
def test_a_client_moves_its_own_descriptor_only(client: int) -> None:
    method = PFedPG(prompt_tokens=TOKENS)
    world = world_of(method)
    before, after = world.roles.server, aggregated(method, world, {client: change_of(world, 1)}, [1.0]).own
    moved = (after["descriptors"] != before["descriptors"]).any(-1)
    assert moved.nonzero().flatten().tolist() == [client]
    for name in ("base", *WEIGHTS):
        assert not torch.equal(after[name], before[name]), name


def test_no_change_leaves_the_server_as_it_is() -> None:
    method = PFedPG(prompt_tokens=TOKENS, server_lr=1.0)
    world = world_of(method)
    nothing = torch.zeros_like(change_of(world, 0))
    after = aggregated(method, world, {0: nothing, 2: nothing}, [0.5, 0.5])
    assert worst_difference(after.own, world.roles.server) == 0.0


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_small_step_brings_generated_prompts_nearer_to_the_trained_ones(seed: int, depth: int) -> None:
    method = PFedPG(prompt_tokens=TOKENS, depth=depth, server_lr=1e-3)
    world = world_of(method)
    own = world.roles.server
    alone = aggregated(method, world, {1: change_of(world, seed)}, [1.0]).own
    target = method.generate(own, own["descriptors"][1]) + change_of(world, seed)
    distance = [float((method.generate(each, each["descriptors"][1]) - target).norm()) for each in (own, alone)]
    assert distance[1] < distance[0]

    changes, weights = {client: change_of(world, seed + client) for client in range(CLIENTS)}, [0.1, 0.2, 0.3, 0.4]
    together = aggregated(method, world, changes, weights).own

    def loss(tensors: Tensors) -> float:
        misses = [
            method.generate(tensors, tensors["descriptors"][client])
            - (method.generate(own, own["descriptors"][client]) + change)
            for client, change in changes.items()
        ]
        return sum(weight * float(miss.square().sum()) for weight, miss in zip(weights, misses, strict=True))

    assert loss(together) < loss(own)


def test_the_server_step_is_the_weighted_chain_rule() -> None:
    """Against central differences of sum_n w_n <P_n(phi), change_n>, coordinate by coordinate."""
    method = PFedPG(prompt_tokens=TOKENS, depth=2, server_lr=0.5)
    world = world_of(method)
    own = world.roles.server
    changes, weights = {0: change_of(world, 1), 3: change_of(world, 2)}, [0.25, 0.75]
    after = aggregated(method, world, changes, weights).own

    def agreement(tensors: Tensors) -> float:
        parts = [naive_generate(tensors, tensors["descriptors"][client], 12) for client in changes]
        return sum(
            weight * float((part * change).sum())
            for weight, part, change in zip(weights, parts, changes.values(), strict=True)
        )

    generator = torch.Generator().manual_seed(0)
    for name, tensor in own.items():
        for place in torch.randperm(tensor.numel(), generator=generator)[:5].tolist():
            nudge = torch.zeros_like(tensor).flatten().index_fill(0, torch.tensor(place), 1e-5).view_as(tensor)
            slope = (agreement({**own, name: tensor + nudge}) - agreement({**own, name: tensor - nudge})) / 2e-5
            found = float((after[name] - tensor).flatten()[place])
            assert found == pytest.approx(0.5 * slope, rel=1e-4, abs=1e-8), name


def first_order_change(method: PFedPG, world: World, after: Tensors) -> dict[int, Tensor]:
    """What a step of the server changes of the generated prompts, by a difference quotient of single steps."""
    own, tiny = {name: each.double() for name, each in world.roles.server.items()}, 1e-6
    nudged = {name: each + tiny * (after[name].double() - each) for name, each in own.items()}
    return {
        client: (
            method.generate(nudged, nudged["descriptors"][client]) - method.generate(own, own["descriptors"][client])
        )
        / tiny
        for client in range(CLIENTS)
    }


@pytest.mark.parametrize("length", [0.1, 1.0, 11.0, 40.0])
def test_a_fitting_rate_moves_generated_prompts_as_far_as_clients_did_however_long_base_prompts_are(
    length: float,
) -> None:
    method = PFedPG(prompt_tokens=TOKENS)
    world = world_of(method)
    base = world.roles.server["base"]
    longer = {**world.roles.server, "base": base * length / base.norm(dim=-1, keepdim=True)}
    world = replace(world, roles=replace(world.roles, server=longer))
    change = 0.01 * torch.ones_like(change_of(world, 0))
    changes, weights = dict.fromkeys(range(CLIENTS), change), [1 / CLIENTS] * CLIENTS
    after = aggregated(method, world, changes, weights).own
    moved = first_order_change(method, world, after)
    agreement = sum(float((each * change).sum()) for each in moved.values()) / CLIENTS
    full = first_order_change(method, world, aggregated(replace(method, server_lr=1.0), world, changes, weights).own)
    far = sum(float((each * change).sum()) for each in full.values()) / CLIENTS
    asked = float(change.square().sum())
    assert agreement == pytest.approx(min(asked, far), rel=1e-3)
    assert length < 10 or far > 3 * asked  # a step of 1 goes much too far


def test_a_fitting_rate_is_never_above_one_and_nothing_where_nothing_changed() -> None:
    method = PFedPG(prompt_tokens=TOKENS)
    world = world_of(method)
    against = {0: change_of(world, 1), 1: -change_of(world, 1)}
    auto, one = (aggregated(each, world, against, [0.5, 0.5]).own for each in (method, replace(method, server_lr=1.0)))
    assert worst_difference(auto, one) == 0.0
    nothing = aggregated(method, world, {0: torch.zeros_like(change_of(world, 0))}, [1.0]).own
    assert worst_difference(nothing, world.roles.server) == 0.0


def test_the_rate_of_the_server_scales_its_step() -> None:
    slow, fast = (PFedPG(prompt_tokens=TOKENS, server_lr=rate) for rate in (1e-3, 1e-2))
    world = world_of(slow)
    steps = []
    for method in (slow, fast):
        after = aggregated(method, world, {0: change_of(world, 1)}, [1.0]).own
        steps.append({name: after[name] - tensor for name, tensor in world.roles.server.items()})
    for name in steps[0]:
        torch.testing.assert_close(10 * steps[0][name], steps[1][name], msg=lambda m, n=name: f"{n}: {m}")


def test_a_client_predicts_with_what_it_trained_or_with_what_it_received() -> None:
    method = PFedPG(prompt_tokens=TOKENS)
    world = world_of(method)
    received = method.download(world, server_of(world), 2)
    new = world.roles.local
    trained = {
        **new,
        "own.prompt": torch.ones_like(new["own.prompt"]),
        "own.trained": torch.ones_like(new["own.trained"]),
    }
    for option, local, expected in (
        ("adapted", trained, trained["own.prompt"]),
        ("adapted", new, received["prompt"]),
        ("generated", trained, received["prompt"]),
        ("generated", new, received["prompt"]),
    ):
        params = replace(method, predict_with=option).personalise(world, client_of(2), received, local)  # type: ignore[arg-type]
        assert torch.equal(params["prompt"], expected), option
        assert "descriptor" not in params


def test_nothing_of_the_server_and_no_head_travels_with_a_prompt(settings: Any) -> None:
    method = {"name": "pfedpg", "prompt_tokens": 5}
    record = run(settings(method=method, federation={"rounds": 1})).rounds()[1]
    assert record.bytes_up == record.bytes_down == 4 * 5 * 32 * 4  # clients x tokens x width x bytes
    method = PFedPG(prompt_tokens=TOKENS)
    world = world_of(method)
    assert set(method.download(world, server_of(world), 0)) == {"prompt"}
    assert set(world.roles.shared) == set()
    assert set(world.roles.server) == {"base", "descriptors", *WEIGHTS}


def test_a_shared_head_is_averaged_and_a_local_one_is_not(settings: Any) -> None:
    done = run(settings(method={"name": "pfedpg", "prompt_tokens": 2, "head": "shared_then_finetune"}))
    assert set(shared_tensors(done)) == set(NAMES)
    assert float(shared_tensors(done)["head.weight"].abs().max()) > 0
    assert set(local_tensors(done, 0)) == {"own.prompt", "own.trained"}


@dataclass(frozen=True)
class Silent(PFedPG):
    """A generator that answers nothing at first."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        silent = {"generator.output": torch.zeros_like(roles.server["generator.output"])}
        return replace(roles, server={**roles.server, **silent})


@pytest.mark.parametrize("depth", [1, None])
def test_with_a_silent_generator_and_a_full_step_the_first_round_is_fedvpt(settings: Any, depth: int | None) -> None:
    one = {"federation": {"rounds": 1, "fraction": 0.5}, "train": {"lr": 0.2, "epochs": 2}}
    silent = run(settings(name="a", **one), Silent(prompt_tokens=2, depth=depth, server_lr=1.0))
    plain = run(settings(name="b", method={"name": "fedvpt", "prompt_tokens": 2, "depth": depth}, **one))
    torch.testing.assert_close(server_tensors(silent)["base"], shared_tensors(plain)["prompt"], atol=1e-6, rtol=1e-5)
    client = plain.rounds()[1].cohort[0]
    assert torch.equal(local_tensors(silent, client)["head.weight"], local_tensors(plain, client)["head.weight"])
    _, _, _, world = experiment(settings(), Silent(prompt_tokens=2, depth=depth)).factory.prepare()
    assert float((server_tensors(silent)["base"] - world.roles.server["base"]).abs().max()) > 1e-4


def test_two_rounds_equal_a_naive_implementation(settings: Any, tmp_path: Path) -> None:
    """`transformers`' ViT, torch's attention and torch's SGD on both sides; half of the clients a round."""
    from transformers import ViTModel

    folder = tmp_path / "vit"
    naive_vit(width=32, depth=3, heads=2, mlp=64, patch=4, image=16, seed=0).save_pretrained(folder)
    lr, momentum, decay, alpha, epochs, size = 0.05, 0.9, 1e-3, 0.5, 2, 8
    values = settings(
        backbone={"name": str(folder), "mean": [0.5] * 3, "std": [0.5] * 3},
        method={"name": "pfedpg", "prompt_tokens": 3, "server_lr": alpha},
        train={"lr": lr, "momentum": momentum, "weight_decay": decay, "epochs": epochs, "batch_size": size},
        federation={"rounds": 2, "fraction": 0.5},
    )
    made = experiment(values)
    source, manifest, _, world = made.factory.prepare()
    done = run(values)

    naive = NaiveVPT(ViTModel.from_pretrained(folder, add_pooling_layer=False).eval())
    store = ImageStore(source, 16, "squash", made.factory.cache)
    server = {name: tensor.clone() for name, tensor in world.roles.server.items()}
    start = world.roles.local
    heads = dict.fromkeys(range(world.clients), (start["head.weight"], start["head.bias"]))
    prompts: dict[int, Tensor] = {}
    for round in (1, 2):
        cohort = sample_cohort(0, round, range(world.clients), 0.5)
        leaves = {name: nn.Parameter(tensor) for name, tensor in server.items()}
        optimiser, loss, total = torch.optim.SGD(leaves.values(), lr=alpha), torch.zeros(()), 0
        for client in cohort:
            indices = manifest.clients[client].train
            images = normalise(store.pixels(indices), (0.5,) * 3, (0.5,) * 3, torch.float32, torch.device("cpu"))
            labels = torch.from_numpy(source.labels[indices])
            generated = naive_generate(leaves, leaves["descriptors"][client], 8)
            order = stream(0, round, client, "batches.local")
            batches = [b for _ in range(epochs) for b in order.permutation(len(indices)).split(size)]
            prompts[client], *head = naive_local_training(
                naive, images, labels, generated.detach(), *heads[client], batches, lr, momentum, decay
            )
            heads[client] = (head[0], head[1])
            gradient = generated.detach() - prompts[client]
            loss, total = loss + len(indices) * (generated * gradient).sum(), total + len(indices)
        (loss / total).backward()
        optimiser.step()
        server = {name: tensor.detach() for name, tensor in leaves.items()}
    found = server_tensors(done)
    for name, tensor in server.items():
        assert float((tensor - world.roles.server[name]).abs().max()) > 1e-7, name
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for client in cohort:
        kept = local_tensors(done, client)
        torch.testing.assert_close(kept["own.prompt"], prompts[client], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kept["head.weight"], heads[client][0], atol=1e-5, rtol=1e-5)
        assert kept["own.trained"] == 1


def test_descriptors_of_clients_that_never_took_part_stay_put(settings: Any) -> None:
    values = settings(
        method={"name": "pfedpg", "prompt_tokens": 2, "server_lr": 1.0}, federation={"rounds": 2, "fraction": 0.25}
    )
    _, _, _, world = experiment(values).factory.prepare()
    done = run(values)
    took_part = {client for record in done.rounds() for client in record.cohort}
    assert 0 < len(took_part) < 4
    moved = (server_tensors(done)["descriptors"] != world.roles.server["descriptors"]).any(-1)
    assert set(moved.nonzero().flatten().tolist()) == took_part


def test_a_newcomer_starts_from_the_mean_descriptor_of_those_that_take_part() -> None:
    method = PFedPG(prompt_tokens=TOKENS)
    world = world_of(method, newcomers=(1, 2))
    own = world.roles.server
    received = method.download(world, server_of(world), 1)
    mean = (own["descriptors"][0] + own["descriptors"][3]) / 2
    torch.testing.assert_close(received["sent.descriptor"], mean)
    torch.testing.assert_close(received["prompt"], naive_generate(own, mean, 12))
    for name in ("base", *WEIGHTS):
        assert torch.equal(received[f"sent.{name}"], own[name])
    assert set(method.download(world, server_of(world), 0)) == {"prompt"}
    params = method.personalise(world, client_of(1), received, world.roles.local)
    given = method.prompts(world, params, None, {})  # type: ignore[arg-type]
    torch.testing.assert_close(given.tokens[0].tokens, received["prompt"])


def held_out(settings: Any, **changes: Any) -> dict[str, Any]:
    return settings(
        method={
            "name": "pfedpg",
            "prompt_init": "random",
            "prompt_tokens": 3,
            "server_lr": 0.1,
            "descriptor_std": 10.0,
        },
        federation={"rounds": 1, "held_out": 0.5, "newcomer_epochs": 2},
        train={"lr": 0.1, "lrs": {"descriptor": 5.0}},
        **changes,
    )


def runtime_of(values: dict[str, Any]) -> tuple[ClientRuntime, World]:
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone)
    states = ClientStates(lambda client: None)
    return ClientRuntime(made.config, world, made.method, bank, states, source.domain_names), world


def test_a_newcomer_fits_descriptor_and_head_while_base_and_generator_stay(settings: Any) -> None:
    runtime, world = runtime_of(held_out(settings))
    method, client = runtime.method, min(world.newcomers)
    received = method.download(world, server_of(world), client)
    before = method.personalise(world, client_of(client), received, world.roles.local)
    after, progress = trained_alone(runtime, fitting_stages(runtime, client), before, 1, client, "adaptation.")
    assert progress.step_sizes["descriptor"] == pytest.approx(5.0 * progress.steps)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"descriptor", *NAMES}


def test_the_gradient_of_a_newcomers_descriptor_is_the_chain_rule_through_the_generator(settings: Any) -> None:
    runtime, world = runtime_of(held_out(settings))
    method, client = runtime.method, min(world.newcomers)
    images, positions = runtime.bank.images(client, "train"), torch.arange(6)
    received = method.download(world, server_of(world), client)
    params = method.personalise(world, client_of(client), received, world.roles.local)
    params["head.weight"] = torch.randn(params["head.weight"].shape, generator=torch.Generator().manual_seed(0))
    descriptor = params["descriptor"].detach().requires_grad_()
    loss = step_loss(method, world, {**params, "descriptor": descriptor}, images, positions, {})
    (found,) = torch.autograd.grad(loss, descriptor)

    prompt = received["prompt"].detach().requires_grad_()
    plain = {name: tensor for name, tensor in {**params, "prompt": prompt}.items() if name != "descriptor"}
    (upstream,) = torch.autograd.grad(step_loss(method, world, plain, images, positions, {}), prompt)
    generated = naive_generate(world.roles.server, descriptor, 8)
    (expected,) = torch.autograd.grad(generated, descriptor, upstream)
    assert float(found.abs().max()) > 1e-6
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)


def test_a_run_with_newcomers_evaluates_them_and_never_moves_their_descriptors(settings: Any) -> None:
    _, _, _, world = experiment(held_out(settings)).factory.prepare()
    done = run(held_out(settings, name="held_out"))
    assert len(done.client_accuracies()) == len(world.newcomers) == 2
    moved = (server_tensors(done)["descriptors"] != world.roles.server["descriptors"]).any(-1)
    assert set(moved.nonzero().flatten().tolist()) == set(range(4)) - world.newcomers
    for client in world.newcomers:
        assert done.reader.client_state(client) is None


@pytest.mark.parametrize("at", ["global", "after_local"])
def test_newcomers_are_evaluated_at_every_point(settings: Any, at: str) -> None:
    values = held_out(settings)
    values["federation"]["evaluate_at"] = at
    assert len(run(values).client_accuracies()) == 2


@pytest.mark.parametrize("method", [{"prompt_tokens": 0}, {"prompt_tokens": 2, "prompt_init": "zero"}, {"depth": None}])
def test_corner_cases_run(settings: Any, method: dict[str, Any]) -> None:
    done = run(settings(method={"name": "pfedpg", "server_lr": 1.0, **method}))
    assert all(torch.isfinite(tensor).all() for tensor in server_tensors(done).values())


def test_in_half_precision_the_server_keeps_single_precision() -> None:
    method = PFedPG(prompt_tokens=TOKENS)
    world = world_of(method, torch.bfloat16)
    assert {tensor.dtype for tensor in world.roles.server.values()} == {torch.float32}
    received = method.download(world, server_of(world), 0)
    assert received["prompt"].dtype == torch.bfloat16
    change = 0.01 * change_of(world, 1).to(torch.bfloat16)
    after = aggregated(method, world, {0: change}, [1.0]).own
    assert after["base"].dtype == torch.float32
    assert (after["base"] != world.roles.server["base"]).all()
    newcomers = replace(world, newcomers=frozenset({0}))
    params = method.personalise(
        newcomers, client_of(0), method.download(newcomers, server_of(world), 0), world.roles.local
    )
    given = method.prompts(newcomers, params, None, {})  # type: ignore[arg-type]
    assert given.tokens[0].tokens.dtype == torch.bfloat16


def test_the_start_of_the_descriptors_has_the_asked_spread() -> None:
    for std in (0.0, 1.0, 7.0):
        found = world_of(PFedPG(descriptor_std=std)).roles.server["descriptors"].std()
        assert float(found) == pytest.approx(std, rel=0.15)


def test_settings_that_cannot_work_are_refused() -> None:
    world = world_of(PFedPG())
    with pytest.raises(ConfigError, match=r"method\.attention_heads must divide the width 24, got 5"):
        PFedPG(attention_heads=5).check(world, TrainConfig())
    with pytest.raises(ConfigError, match=r"method\.depth must be at most the 3 blocks of the backbone, got 4"):
        PFedPG(depth=4).check(world, TrainConfig())
    with pytest.raises(ConfigError, match=r"method\.predict_with must .*, got 'both'"):
        registry.build({"name": "pfedpg", "predict_with": "both"})
    with pytest.raises(ConfigError, match=r"method\.server_lr must .*, got -1"):
        registry.build({"name": "pfedpg", "server_lr": -1})
