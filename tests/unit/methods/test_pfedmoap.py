"""pFedMoAP: whole runs against a naive loop and against PromptFL, and who sees whose prompts and gates when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import (
    StopAfter,
    Stopped,
    content,
    experiment,
    fitting_stages,
    local_tensors,
    pool_tensors,
    run,
    server_tensors,
    shared_tensors,
    trained_alone,
    worst_difference,
)
from torch import Tensor, nn

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch
from fedprompt.config import TrainConfig
from fedprompt.core import registry
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Batch, Seen, Server, Upload, World
from fedprompt.core.pool import Pool
from fedprompt.core.roles import Roles
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.pfedmoap import GATE, PFedMoAP
from fedprompt.methods.promptfl import PromptFL
from fedprompt.modules import gates
from fedprompt.random_streams import Stream, stream
from fedprompt.tensors import Tensors, stripped

pytestmark = pytest.mark.unit

TOKENS, WIDTH, CLASSES, FEATURES, CLIENTS = 3, 32, 5, 128, 4
SMALL = PFedMoAP(context_tokens=TOKENS, gate_width=32)


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tiny(settings: Any) -> Callable[..., dict[str, Any]]:
    """Two rounds of everybody at a rate that makes prompts and gates move."""

    def make(**changes: Any) -> dict[str, Any]:
        train = {"lr": 0.05, "weight_decay": 0.01, **changes.pop("train", {})}
        data = {"train_per_cell": 2, "test_per_cell": 1}
        return settings(train=train, data=data, federation={"rounds": 2, **changes.pop("federation", {})}, **changes)

    return make


@pytest.fixture
def runtime(tiny: Any) -> Callable[..., ClientRuntime]:
    def make(method: PFedMoAP = SMALL, **changes: Any) -> ClientRuntime:
        made = experiment(tiny(**changes), method)
        source, manifest, backbone, world = made.factory.prepare()
        bank = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone)
        return ClientRuntime(made.config, world, method, bank, ClientStates(lambda client: None), source.domain_names)

    return make


def server_with(world: World, pool: dict[int, Tensor], round: int = 1) -> Server:
    return Server(world.roles.shared, world.roles.server, round, Pool().with_rows(pool))


def full_pool(seed: int = 0) -> dict[int, Tensor]:
    return {client: 0.1 * normal(TOKENS, WIDTH, seed=seed + client) for client in range(CLIENTS)}


def seen_by(runtime: ClientRuntime, params: Tensors, client: int = 0) -> tuple[Seen, Batch]:
    images, positions = runtime.bank.images(client, "train"), torch.arange(6)
    batch = make_batch(runtime.method, images, positions, training=True)
    return forward(runtime.method, runtime.world, params, images, positions, batch, {}), batch


def begun(runtime: ClientRuntime, pool: dict[int, Tensor], client: int = 0) -> Tensors:
    who = runtime._client(client, 2)
    received = runtime.method.download(runtime.world, server_with(runtime.world, pool), client)
    return runtime.method.begin(runtime.world, who, received, runtime._new(who))


def logits_of(runtime: ClientRuntime, params: Tensors, client: int = 0, **settings: Any) -> Tensor:
    seen, batch = seen_by(runtime, params, client)
    return replace(runtime.method, **settings).logits(runtime.world, params, seen, batch, {})  # type: ignore[type-var]


# --- the whole method ----------------------------------------------------------------------------------------------------------------


class NaiveGate(nn.Module):
    """The paper's forward, image by image and class by class through torch's attention."""

    def __init__(self, tensors: Tensors, heads: int) -> None:
        super().__init__()
        width = tensors["query.bias"].numel()
        for part in gates.PARTS:
            layer = nn.Linear(width, width)
            layer.weight.data, layer.bias.data = tensors[f"{part}.weight"].clone(), tensors[f"{part}.bias"].clone()
            setattr(self, part, layer)
        self.heads = heads

    def forward(self, image: Tensor, experts: Tensor, scaling: float) -> Tensor:
        """Mixtures (B, C, w) of pooled images (B, w) and pooled experts (C, E, w)."""
        query = self.query(image).view(len(image), self.heads, 1, -1)
        answers = []
        for one in experts:
            key, value = (
                part(one).view(1, len(one), self.heads, -1).transpose(1, 2) for part in (self.key, self.value)
            )
            weights = torch.softmax(scaling * (query @ key.transpose(2, 3)), dim=-1)
            answers.append(self.output((weights @ value).transpose(1, 2).reshape(len(image), -1)))
        return torch.stack(answers, dim=1)


def test_three_rounds_equal_a_naive_loop(tiny: Any) -> None:
    """Partial participation, momentum, decay and rates by name, with torch's modules and optimiser and a brute-force search."""
    method = PFedMoAP(context_tokens=TOKENS, gate_width=32, heads=4, experts=3, local_weight=0.7)
    lr, gate_lr, momentum, decay, size, epochs = 0.05, 0.2, 0.9, 0.01, 4, 1
    values = tiny(
        train={"lr": lr, "lrs": {"gate.*": gate_lr}, "momentum": momentum, "batch_size": size, "epochs": epochs},
        federation={"rounds": 3, "fraction": 0.75, "evaluate_every": 3},
    )
    made = experiment(values, method)
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone)
    done = run(values, method)

    start = world.roles
    everyones = start.shared["context"].clone()
    pool: dict[int, Tensor] = {}
    trained: dict[int, Tensor] = {}
    modules = {client: NaiveGate(stripped(GATE, start.local), heads=4) for client in range(CLIENTS)}
    gated: set[int] = set()

    def say(context: Tensor) -> Tensor:
        return world.text.encode(context.unsqueeze(0), "end")[0]

    for round in range(1, 4):
        before, uploads, counts = dict(pool), [], []
        for client in sample_cohort(0, round, range(CLIENTS), 0.75):
            experts: list[Tensor] = []
            if client in before:
                rest = sorted(
                    (float((before[other] - before[client]).double().norm()), other)
                    for other in before
                    if other != client
                )
                experts = [say(before[other]).detach() for _, other in rest[:2]]
                gated |= {client} if experts else set()
            context, gate = nn.Parameter(everyones.clone()), modules[client]
            groups = [{"params": [context], "lr": lr}]
            groups += [{"params": list(gate.parameters()), "lr": gate_lr}] if experts else []
            optimiser = torch.optim.SGD(groups, momentum=momentum, weight_decay=decay)
            images = bank.images(client, "train")
            order = stream(0, round, client, "batches.local")
            for _ in range(epochs):
                for positions in order.permutation(len(images)).split(size):
                    image, own = images.features("image", positions), say(context)
                    local = world.text.scale * image @ own.T
                    logits = local
                    if experts:
                        pooled = torch.stack([own, *experts], dim=1)[..., ::4]
                        mixture = gate(image[..., ::4], pooled, 10.0)
                        moe = torch.stack([(mixture[:, c] * image[..., ::4]).sum(-1) for c in range(CLASSES)], dim=1)
                        logits = world.text.scale * moe + 0.7 * local
                    optimiser.zero_grad()
                    F.cross_entropy(logits, images.labels[positions]).backward()
                    optimiser.step()
            trained[client] = context.detach()
            uploads.append(context.detach())
            counts.append(len(images))
            pool[client] = context.detach()
        everyones = sum(n / sum(counts) * each for n, each in zip(counts, uploads, strict=True))  # type: ignore[assignment]

    assert len(gated) > 0
    torch.testing.assert_close(shared_tensors(done)["context"], everyones, atol=2e-5, rtol=1e-4)
    found = pool_tensors(done)
    assert set(found) == set(pool)
    assert not server_tensors(done)
    for client, context in trained.items():
        kept = local_tensors(done, client)
        torch.testing.assert_close(found[client], context, atol=2e-5, rtol=1e-4)
        assert torch.equal(kept["last_context"], found[client])
        for part in gates.PARTS:
            for kind in ("weight", "bias"):
                expected = getattr(getattr(modules[client], part), kind).detach()
                torch.testing.assert_close(kept[f"gate.{part}.{kind}"], expected, atol=2e-5, rtol=1e-4)
        moved = not torch.equal(kept["gate.value.weight"], start.local["gate.value.weight"])
        assert moved == (client in gated) == bool(kept["gate_trained"])


@dataclass(frozen=True)
class Silent(PFedMoAP):
    """A gate whose output layer is zero."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        quiet = {name: 0 * tensor if "output" in name else tensor for name, tensor in roles.local.items()}
        return replace(roles, local=quiet)


def test_a_silent_gate_and_lambda_one_are_promptfl(tiny: Any) -> None:
    changes = {"train": {"lrs": {"gate.*": 0.0}, "epochs": 2}}
    at_global = {"rounds": 2, "evaluate_at": "global"}
    silent = run(tiny(name="silent", federation=at_global, **changes), Silent(context_tokens=TOKENS, local_weight=1.0))
    plain = run(tiny(name="plain", federation=at_global, **changes), PromptFL(context_tokens=TOKENS))
    assert worst_difference(shared_tensors(silent), shared_tensors(plain)) < 1e-6
    for one, other in zip(silent.rounds()[1:], plain.rounds()[1:], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.summary["nll"] == pytest.approx(other.summary["nll"], rel=1e-5)
        assert one.summary["average"] == other.summary["average"]


def test_without_other_experts_the_trajectory_is_that_of_promptfl_to_the_bit(tiny: Any) -> None:
    alone = run(tiny(name="alone"), replace(SMALL, experts=1))
    plain = run(tiny(name="plain"), PromptFL(context_tokens=TOKENS))
    assert worst_difference(shared_tensors(alone), shared_tensors(plain)) == 0.0


def test_the_first_round_is_promptfl_and_leaves_the_gates_alone_the_second_is_not(tiny: Any) -> None:
    _, _, _, world = experiment(tiny(), SMALL).factory.prepare()
    for rounds, same in ((1, True), (2, False)):
        ours = run(tiny(name=f"ours{rounds}", federation={"rounds": rounds}), SMALL)
        plain = run(tiny(name=f"plain{rounds}", federation={"rounds": rounds}), PromptFL(context_tokens=TOKENS))
        assert (worst_difference(shared_tensors(ours), shared_tensors(plain)) == 0.0) == same
        for client in range(CLIENTS):
            kept = local_tensors(ours, client)
            resting = [torch.equal(kept[name], world.roles.local[name]) for name in kept if name.startswith(GATE)]
            assert all(resting) if same else not any(resting)


# --- logits --------------------------------------------------------------------------------------------------------------------------


def test_alone_the_logits_are_those_of_coop_and_the_gate_has_no_gradient(runtime: Any) -> None:
    made = runtime()
    params = begun(made, {})
    leaves = {
        name: params[name].requires_grad_() for name in made.method.stages(made.world, TrainConfig())[0].trainable
    }
    params = {**params, **leaves}
    seen, batch = seen_by(made, params)
    logits = made.method.logits(made.world, params, seen, batch, {})
    assert torch.equal(logits, PromptFL().logits(made.world, params, seen, batch, {}))
    loss = made.method.loss(made.world, params, logits, seen, batch, {})
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert float(grads.pop("context").abs().max()) > 1e-6
    assert all((grad == 0).all() for grad in grads.values())


def test_a_gate_used_alone_passes_value_and_output(runtime: Any) -> None:
    made = runtime(replace(SMALL, gate_when_alone=True))
    params = begun(made, {})
    seen, _ = seen_by(made, params)
    gate, image, text = stripped(GATE, params), seen.image[:, ::4], seen.text["context"][:, ::4]
    value = F.linear(text, gate["value.weight"], gate["value.bias"])
    mixture = F.linear(value, gate["output.weight"], gate["output.bias"])
    expected = made.world.text.scale * (image @ mixture.T + 0.5 * seen.image @ seen.text["context"].T)
    torch.testing.assert_close(logits_of(made, params), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("gate", ["attention", "linear"])
def test_logits_are_affine_in_lambda_and_zero_drops_the_local_term(runtime: Any, gate: str) -> None:
    made = runtime(replace(SMALL, gate=gate))
    params = begun(made, full_pool())
    seen, batch = seen_by(made, params)
    local = PromptFL().logits(made.world, params, seen, batch, {})
    nothing = logits_of(made, params, local_weight=0.0)
    for weight in (0.5, 3.0):
        torch.testing.assert_close(logits_of(made, params, local_weight=weight), nothing + weight * local)
    assert float((nothing - local).abs().max()) > 0.1


def test_a_gate_without_output_leaves_lambda_times_the_local_logits(runtime: Any) -> None:
    made = runtime()
    params = begun(made, full_pool())
    params |= {name: torch.zeros_like(params[name]) for name in ("gate.output.weight", "gate.output.bias")}
    seen, batch = seen_by(made, params)
    expected = 0.5 * PromptFL().logits(made.world, params, seen, batch, {})
    torch.testing.assert_close(logits_of(made, params), expected)


@pytest.mark.parametrize("pooling", ["stride", "mean"])
def test_experts_that_equal_the_local_one_under_an_identity_are_pooled_similarity(runtime: Any, pooling: str) -> None:
    made = runtime(replace(SMALL, pooling=pooling, local_weight=0.0))
    context = made.world.roles.shared["context"]
    params = begun(made, dict.fromkeys(range(CLIENTS), context))
    eye = torch.eye(32)
    params |= {name: torch.zeros_like(params[name]) for name in params if name.startswith(GATE) and "bias" in name}
    params |= {"gate.value.weight": eye, "gate.output.weight": eye}
    seen, _ = seen_by(made, params)
    image, text = (
        x[:, ::4] if pooling == "stride" else x.view(len(x), 32, 4).mean(-1) for x in (seen.image, seen.text["context"])
    )
    torch.testing.assert_close(logits_of(made, params), made.world.text.scale * image @ text.T, atol=1e-4, rtol=1e-4)


def test_the_order_of_experts_does_not_matter_to_the_attention(runtime: Any) -> None:
    made = runtime()
    params = begun(made, full_pool())
    turned = {**params, "expert_features": params["expert_features"].flip(0)}
    torch.testing.assert_close(logits_of(made, turned), logits_of(made, params), atol=1e-5, rtol=1e-5)


def test_a_small_pool_is_filled_up_with_experts_that_do_not_count(runtime: Any) -> None:
    made = runtime()
    pool = {client: full_pool()[client] for client in (0, 2)}
    params = begun(made, pool)
    assert params["expert_features"].shape == (CLIENTS - 1, CLASSES, FEATURES)
    assert params["expert_known"].tolist() == [1, 0, 0]
    noisy = params["expert_features"].clone()
    noisy[1:] = normal(2, CLASSES, FEATURES, seed=1)
    assert torch.equal(logits_of(made, {**params, "expert_features": noisy}), logits_of(made, params))
    assert {name: tensor.shape for name, tensor in begun(made, {}).items()} == {
        name: tensor.shape for name, tensor in params.items()
    }


def test_no_gradient_reaches_the_prompts_of_others(runtime: Any) -> None:
    made = runtime()
    who = made._client(0, 2)
    received = made.method.download(made.world, server_with(made.world, full_pool()), 0)
    received["experts"].requires_grad_()
    params = made.method.begin(made.world, who, received, made._new(who))
    assert not params["expert_features"].requires_grad
    expected = made.world.text.encode(received["experts"], "end").detach()
    torch.testing.assert_close(params["expert_features"], expected)


@pytest.mark.parametrize("experts", [1, 2, 4, 10])
def test_experts_are_encoded_once_in_a_participation(runtime: Any, experts: int) -> None:
    made = runtime(replace(SMALL, experts=experts), train={"epochs": 3})
    without_gradient: list[int] = []
    language = made.world.text

    def encode(contexts: Tensor, position: Any) -> Tensor:
        if not torch.is_grad_enabled():
            without_gradient.append(len(contexts))
        return language.encode(contexts, position)

    made.world = replace(made.world, language=replace(language, encode=encode))
    received = made.method.download(made.world, server_with(made.world, full_pool()), 1)
    made.train(2, 1, received)
    assert without_gradient == ([] if experts == 1 else [min(experts, CLIENTS) - 1])


# --- pool and selection --------------------------------------------------------------------------------------------------------------


def test_experts_are_the_nearest_to_ones_own_entry_and_never_oneself(runtime: Any) -> None:
    world = runtime(replace(SMALL, experts=3)).world
    pool = {client: torch.full((TOKENS, WIDTH), level) for client, level in enumerate((0.0, 10.0, 11.0, 13.0))}
    method = replace(SMALL, experts=3)
    levels = {
        client: method.download(world, server_with(world, pool), client)["experts"][:, 0, 0].tolist()
        for client in range(CLIENTS)
    }
    # the shared context is near 0, so a client that asked from there would get client 0 first
    assert levels == {0: [10.0, 11.0], 1: [11.0, 13.0], 2: [10.0, 13.0], 3: [11.0, 10.0]}


def test_ties_go_to_the_smaller_client_number(runtime: Any) -> None:
    made = runtime(replace(SMALL, experts=2))
    pool = full_pool()
    pool[1] = pool[3] = pool[0] + 1
    pool[2] = pool[0] - 1
    received = made.method.download(made.world, server_with(made.world, dict(reversed(pool.items()))), 0)
    assert torch.equal(received["experts"], pool[1].unsqueeze(0))


def test_nobody_sees_what_was_uploaded_in_the_same_round(runtime: Any) -> None:
    made = runtime()
    before = server_with(made.world, full_pool())
    first = made.method.download(made.world, before, 3)
    uploads = [Upload(client, {"context": normal(TOKENS, WIDTH, seed=40 + client)}, 0.5) for client in (0, 1)]
    after = made.method.aggregate(made.world, before, uploads, weighted_mean)
    assert worst_difference(made.method.download(made.world, before, 3), first) == 0.0
    assert worst_difference(made.method.download(made.world, after, 3), first) > 0.1


def test_the_pool_grows_by_first_participations_and_keeps_the_last_upload(tiny: Any) -> None:
    _, _, _, world = experiment(tiny(), SMALL).factory.prepare()
    assert world.roles.server == {}
    method, server = SMALL, Server(world.roles.shared, {})
    assert method.download(world, server, 0)["experts"].shape == (0, TOKENS, WIDTH)
    for round, clients in enumerate(((2, 3), (3, 0), (0, 1, 2, 3), (1,)), start=1):
        contexts = {client: normal(TOKENS, WIDTH, seed=10 * round + client) for client in clients}
        older = server.pool
        uploads = [Upload(client, {"context": context}, 1 / len(clients)) for client, context in contexts.items()]
        server = replace(method.aggregate(world, server, uploads, weighted_mean), round=round)
        assert set(server.pool.clients.tolist()) == {*older.clients.tolist(), *clients}
        assert not server.own
        for client in server.pool.clients.tolist():
            expected = contexts[client] if client in contexts else older.rows([client])[0]
            assert torch.equal(server.pool.rows([client])[0], expected)
        torch.testing.assert_close(server.shared["context"], torch.stack(list(contexts.values())).mean(0))


def test_bytes_are_those_of_the_context_and_of_the_experts_that_were_there(tiny: Any) -> None:
    one = TOKENS * WIDTH * 4
    rounds = run(tiny(federation={"rounds": 2}), replace(SMALL, experts=3)).rounds()
    assert [record.bytes_down for record in rounds[1:]] == [CLIENTS * one, CLIENTS * (1 + 2) * one]
    assert [record.bytes_up for record in rounds[1:]] == [CLIENTS * one] * 2


def test_random_experts_hang_on_seed_round_and_client_alone(tiny: Any, runtime: Any) -> None:
    method = replace(SMALL, experts=2, selection="random")
    pool = full_pool()

    def picked(world: World, round: int, client: int) -> int:
        (expert,) = method.download(world, server_with(world, pool, round), client)["experts"]
        return next(number for number, context in pool.items() if torch.equal(context, expert))

    worlds = [experiment(tiny(seed=seed), method).factory.prepare()[3] for seed in (0, 0, 1)]
    draws = [[picked(world, round, 0) for round in range(60)] for world in worlds]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) == {1, 2, 3}
    assert draws[0] != [picked(worlds[0], round, 1) for round in range(60)]
    assert all(picked(worlds[0], round, client) != client for round in range(10) for client in range(CLIENTS))


# --- who owns what -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["attention", "linear"])
@pytest.mark.parametrize("sharing", ["local", "aggregated"])
def test_a_gate_goes_up_only_where_it_is_aggregated(tiny: Any, sharing: str, gate: str) -> None:
    method = replace(SMALL, gate_sharing=sharing, gate=gate, selection="random")
    done = run(tiny(train={"lrs": {"gate.*": 0.2}}), method)
    shared = {name for name in shared_tensors(done) if name.startswith(GATE)}
    kept = {name for name in local_tensors(done, 0) if name.startswith(GATE)}
    names = {"gate.linear.weight", "gate.linear.bias"}
    if gate == "attention":
        names = {f"gate.{part}.{kind}" for part in gates.PARTS for kind in ("weight", "bias")}
    assert (shared, kept) == ((names, set()) if sharing == "aggregated" else (set(), names))
    if sharing == "aggregated":
        _, _, _, world = experiment(tiny(), method).factory.prepare()
        assert all(not torch.equal(shared_tensors(done)[name], world.roles.shared[name]) for name in names)
    else:
        mine, theirs = (local_tensors(done, client) for client in (0, 1))
        assert all(not torch.equal(mine[name], theirs[name]) for name in names)


def test_a_clients_training_hangs_on_nobody_who_trained_before_it(runtime: Any) -> None:
    alone, after = runtime(), runtime()
    server = server_with(alone.world, full_pool())
    for made, clients in ((alone, (2,)), (after, (3, 0, 2))):
        for client in clients:
            made.train(2, client, made.method.download(made.world, server, client))
    assert worst_difference(alone.states.get(2), after.states.get(2)) == 0.0


def trained(runtime: ClientRuntime, client: int = 1) -> Tensors:
    """The state of a client that took part with and without a gate."""
    for round, pool in ((1, {}), (2, full_pool())):
        server = server_with(runtime.world, pool, round)
        runtime.train(round, client, runtime.method.download(runtime.world, server, client))
    return runtime._local(client, runtime._client(client, 2))


def personal(runtime: ClientRuntime, pool: dict[int, Tensor], local: Tensors, client: int = 1) -> Tensors:
    received = runtime.method.download(runtime.world, server_with(runtime.world, pool, 9), client)
    return runtime.method.personalise(runtime.world, runtime._client(client, 9), received, local)


def test_a_client_that_was_away_predicts_with_its_own_prompt_and_gate_and_the_pool_of_today(runtime: Any) -> None:
    made = runtime()
    local = trained(made)
    pool = {**full_pool(seed=50), 1: local["last_context"]}
    params = personal(made, pool, local)
    assert torch.equal(params["context"], local["last_context"])
    assert not torch.equal(params["context"], made.world.roles.shared["context"])
    for name in local:
        if name.startswith(GATE):
            assert torch.equal(params[name], local[name])
            assert not torch.equal(params[name], made.world.roles.local[name])
    order = sorted((c for c in pool if c != 1), key=lambda c: float((pool[c] - pool[1]).norm()))
    expected = made.world.text.encode(torch.stack([pool[c] for c in order]), "end")
    torch.testing.assert_close(params["expert_features"], expected)
    assert params["gated"] == 1


def test_a_client_that_never_took_part_predicts_with_the_shared_context_and_no_gate(runtime: Any) -> None:
    for method in (SMALL, replace(SMALL, gate_when_alone=True)):
        made = runtime(method)
        pool = {client: context for client, context in full_pool().items() if client != 1}
        who, moved = made._client(1, 9), {"context": normal(TOKENS, WIDTH, seed=3)}
        received = method.download(made.world, replace(server_with(made.world, pool), shared=moved), 1)
        params = method.personalise(made.world, who, received, made._new(who))
        assert torch.equal(params["context"], moved["context"])
        seen, batch = seen_by(made, params, client=1)
        expected = PromptFL().logits(made.world, params, seen, batch, {})
        assert torch.equal(method.logits(made.world, params, seen, batch, {}), expected)


def test_a_gate_is_used_to_predict_once_it_was_trained(runtime: Any) -> None:
    made = runtime()
    server = server_with(made.world, {}, 0)
    made.train(1, 1, made.method.download(made.world, server, 1))
    local = made._local(1, made._client(1, 1))
    assert (local["took_part"], local["gate_trained"]) == (1, 0)
    params = personal(made, full_pool(), local)
    assert torch.equal(params["context"], local["last_context"])
    assert params["gated"] == 0
    assert not params["expert_known"].any(), "experts that are not used need not be encoded"
    assert made.method.diagnostics(made.world, params, *seen_by(made, params, client=1)) == {}
    assert trained(made)["gate_trained"] == 1


def test_diagnostics_say_where_the_gate_looks(tiny: Any, runtime: Any) -> None:
    done = run(tiny(federation={"rounds": 2}), SMALL)
    first, second = (record.summary["diagnostics"] for record in done.rounds()[1:])
    assert first == {}
    assert set(second) == {"gate.weight_local", "gate.weight_other", "gate.entropy"}
    assert second["gate.weight_local"] + 3 * second["gate.weight_other"] == pytest.approx(1.0, abs=1e-5)
    assert 0 < second["gate.entropy"] <= 1

    made = runtime(replace(SMALL, scaling=0.0))
    params = begun(made, {client: full_pool()[client] for client in (0, 1, 2)})
    found = made.method.diagnostics(made.world, params, *seen_by(made, params))
    for name, expected in (("gate.weight_local", 1 / 3), ("gate.weight_other", 1 / 3), ("gate.entropy", 1.0)):
        assert found[name].tolist() == pytest.approx([expected] * len(found[name]), abs=1e-6)
    alone = replace(made.method, gate_when_alone=True)
    params = {**begun(made, {}), "gated": torch.ones(())}
    found = alone.diagnostics(made.world, params, *seen_by(made, params))
    means = {name: value.mean().item() for name, value in found.items()}
    assert means == {"gate.weight_local": 1.0, "gate.entropy": 0.0}


def test_held_out_clients_tune_the_shared_context_as_in_a_first_round(tiny: Any, runtime: Any) -> None:
    held_out = {"rounds": 2, "held_out": 0.5, "newcomer_epochs": 2}
    made = runtime(federation=held_out)
    client = min(made.world.newcomers)
    before = personal(
        made,
        {c: p for c, p in full_pool().items() if c not in made.world.newcomers},
        made._new(made._client(client, 2)),
        client,
    )
    after, _ = trained_alone(made, fitting_stages(made, client), before, 2, client, "adaptation.", fitting=True)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"context"}
    done = run(tiny(name="held_out", federation=held_out), SMALL)
    assert len(done.client_accuracies()) == len(made.world.newcomers) == 2
    assert set(pool_tensors(done)) == set(range(4)) - made.world.newcomers
    assert made.method.others(made.world) == 1


# --- settings ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings_of_the_method",
    [
        {"selection": "random", "experts": 2},
        {"gate": "linear", "heads": 7},
        {"gate_sharing": "aggregated", "pooling": "mean"},
        {"gate_when_alone": True, "local_weight": 0.0},
        {"class_specific": True, "class_position": "middle"},
    ],
    ids=lambda value: "-".join(value),
)
def test_every_option_runs_and_resumes_to_the_same_bits(tiny: Any, settings_of_the_method: dict[str, Any]) -> None:
    method = replace(SMALL, **settings_of_the_method)
    short = {"rounds": 2, "fraction": 0.75, "evaluate_every": 2}
    with pytest.raises(Stopped):
        run(tiny(name="broken", federation=short), method, StopAfter(1))
    resumed = run(tiny(name="broken", federation=short), method, resume=True)
    assert content(resumed) == content(run(tiny(name="whole", federation=short), method))


@pytest.mark.parametrize("at", ["after_local", "global"])
def test_it_can_be_evaluated_at_every_point(tiny: Any, at: str) -> None:
    assert len(run(tiny(federation={"evaluate_at": at, "rounds": 2}), SMALL).client_accuracies()) == CLIENTS


def test_defaults_are_the_papers_and_the_symbol_of_a_setting_is_known() -> None:
    method = PFedMoAP()
    assert (method.experts, method.gate_width, method.heads, method.scaling) == (10, 128, 8, 10.0)
    assert (method.local_weight, method.selection, method.pooling) == (0.5, "nearest", "stride")
    assert (method.gate, method.gate_sharing, method.gate_when_alone) == ("attention", "local", False)
    assert registry.build({"name": "pfedmoap", "lambda": 0.25}) == PFedMoAP(local_weight=0.25)


def test_the_gate_of_a_client_has_the_papers_numbers(tiny: Any) -> None:
    _, _, _, world = experiment(tiny(), PFedMoAP()).factory.prepare()
    assert sum(t.numel() for name, t in world.roles.local.items() if name.startswith(GATE)) == 66_048
    linear = replace(SMALL, gate="linear", experts=3)
    _, _, _, world = experiment(tiny(), linear).factory.prepare()
    assert sum(t.numel() for name, t in world.roles.local.items() if name.startswith(GATE)) == 3 * (32 + 1)


def test_settings_that_cannot_work_are_refused(tiny: Any) -> None:
    _, _, _, world = experiment(tiny(), SMALL).factory.prepare()
    train = TrainConfig()
    with pytest.raises(ConfigError, match=r"method\.gate_width must divide the 128 dimensions of the features, got 48"):
        PFedMoAP(gate_width=48).check(world, train)
    with pytest.raises(
        ConfigError, match=r"method\.gate_width must divide the 128 dimensions of the features, got 256"
    ):
        PFedMoAP(gate_width=256, gate="linear").check(world, train)
    with pytest.raises(ConfigError, match=r"method\.heads must divide method\.gate_width 128, got 5"):
        PFedMoAP(heads=5).check(world, train)
    PFedMoAP(heads=5, gate="linear").check(world, train)
    for field, value in (("experts", 0), ("local_weight", -1), ("gate", "mlp"), ("selection", "far"), ("heads", 0)):
        with pytest.raises(ConfigError, match=rf"method\.{field} must .*, got "):
            registry.build({"name": "pfedmoap", field: value})
