"""Every registered method, every variant on FedVPT, and the hardest future users: what the contract promises about each.

A new method file gets all of these tests with no other edit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from every_method import CASES
from hard_users import HARD_USERS
from support import (
    Backwards,
    StopAfter,
    Stopped,
    content,
    experiment,
    local_tensors,
    run,
    server_tensors,
    shared_tensors,
)
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch, rows_of
from fedprompt.config import TrainConfig
from fedprompt.core import registry
from fedprompt.core.method import Batch, Method, Prompts, Seen, Server, Upload, World
from fedprompt.core.recipe import learning_rate, resolve
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.engines import kinds
from fedprompt.features.image_bank import ImageBank
from fedprompt.modules.contexts import TextContext
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import stream
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors
from fedprompt.tuning.space import trained

pytestmark = pytest.mark.matrix


@pytest.fixture(params=CASES, ids=list(CASES))
def method(request: pytest.FixtureRequest) -> Method:
    return CASES[request.param]


@pytest.fixture
def tiny(settings: Any) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        federation = {"rounds": 2, "fraction": 0.5, **changes.pop("federation", {})}
        train = changes.pop("train", {"momentum": 0.0})
        data = {"train_per_cell": 2, "test_per_cell": 1}  # two batches of a client, the second not full
        return settings(data=data, train=train, federation=federation, **changes)

    return make


def test_recommended_rates_are_numbers_for_all_that_is_trained(method: Method, tiny: Any) -> None:
    """Relative rates too, which need to know how large a tensor was before the first round."""
    world = experiment(tiny(), method).factory.prepare().world
    train = resolve(TrainConfig(), method.recipe)
    rates = [learning_rate(train, name, world.roles.initial) for name in trained(method, world, train)]
    assert all(0 <= rate < float("inf") for rate in rates)


@pytest.mark.sampled
def test_a_run_is_the_same_bits_twice(method: Method, tiny: Any) -> None:
    assert content(run(tiny(name="once"), method)) == content(run(tiny(name="again"), method))


@pytest.mark.sampled
def test_an_interrupted_run_ends_as_an_undisturbed_one(method: Method, tiny: Any) -> None:
    with pytest.raises(Stopped):
        run(tiny(name="broken"), method, StopAfter(1))
    resumed = run(tiny(name="broken"), method, resume=True)
    assert content(resumed) == content(run(tiny(name="whole"), method))


@pytest.mark.sampled
@pytest.mark.parametrize("variant", registry.variants())
@pytest.mark.parametrize("user", list(HARD_USERS))
def test_every_variant_wraps_every_kind_of_method_and_resumes_to_the_same_bits(
    user: str, variant: str, tiny: Any
) -> None:
    wrapped = registry.variants()[variant](inner=HARD_USERS[user])  # type: ignore[call-arg]
    rough = {"train": {"lr": 0.3, "momentum": 0.0, "epochs": 2}, "federation": {"rounds": 3, "fraction": 1.0}}
    with pytest.raises(Stopped):
        run(tiny(name="broken", **rough), wrapped, StopAfter(2))
    assert content(run(tiny(name="broken", **rough), wrapped, resume=True)) == content(
        run(tiny(name="whole", **rough), wrapped)
    )


def test_the_bytes_of_a_survey_are_those_that_were_sent(tiny: Any) -> None:
    first = run(tiny(), HARD_USERS["statistics"]).rounds()[0]
    classes, width, clients = 5, 32, 4
    head, prompts, prototypes, known = classes * (width + 1), classes * width, classes * width, classes
    assert first.bytes_down == clients * 4 * (head + prompts + prototypes + known)
    assert first.bytes_up == clients * 4 * (classes * width + classes)
    assert first.seconds["survey"] > 0


@pytest.mark.sampled
def test_the_order_of_clients_changes_nothing(method: Method, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = {"federation": {"fraction": 1.0, "rounds": 2}, "engine": {"cohort": 2}}
    forward = run(tiny(name="forward", **rounds), method)
    monkeypatch.setattr(kinds, "InProcess", Backwards)
    backward = run(tiny(name="backward", **rounds), method)
    assert content(forward) == content(backward)


@pytest.mark.sampled
def test_a_client_that_was_not_picked_keeps_its_bytes(method: Method, tiny: Any) -> None:
    values = tiny(seed=2, federation={"rounds": 6, "fraction": 0.25})
    with pytest.raises(Stopped):
        run(values, method, StopAfter(3))
    before = Run(experiment(values, method).config.run_directory)
    states = {client: (round, blob) for client, round, blob in before.reader.client_states()}
    after = run(values, method, resume=True)
    later = {client for record in after.rounds() if record.round > 3 for client in record.cohort}
    rested = [client for client in states if client not in later]
    assert rested, "the seed must leave a client out of the last rounds"
    for client in rested:
        assert after.reader.client_state(client) == states[client][1]


def test_tensors_are_where_they_were_declared_and_every_client_is_evaluated(method: Method, tiny: Any) -> None:
    """The server holds no local tensor, a client keeps exactly its own, and one that never trained is evaluated, too."""
    done = run(tiny(federation={"fraction": 0.25}), method)
    _, _, _, world = experiment(tiny(), method).factory.prepare()
    assert set(shared_tensors(done)) == set(world.roles.shared)
    assert not set(server_tensors(done)) & set(world.roles.local)
    trained = {client for record in done.rounds() for client in record.cohort}
    assert 1 <= len(trained) < 4
    for client in trained:
        assert set(local_tensors(done, client)) == set(world.roles.local)
    assert len(done.client_accuracies()) == 4


def test_folding_clients_into_one_batch_equals_one_client_at_a_time(method: Method, tiny: Any) -> None:
    """The cheap parts under vmap over stacked parameters, the backbone once over everybody's samples: values and gradients to 1e-5."""
    world, backbone, runtime, params = _working_parameters(method, tiny)
    positions = torch.arange(6)
    stages = method.stages(world, runtime.config.train)
    step, trainable = (stages[-1].step, stages[-1].trainable) if stages else (method, ())
    alone, batches, noises, tokens, grads = [], [], [], [], []
    for client, own in enumerate(params):
        images = runtime.bank.images(client, "train")
        batch = make_batch(step, images, positions, training=True)
        noise = step.noise(world, len(positions), True, stream(0, 1, client, "noise"))
        leaves = {name: own[name].detach().requires_grad_() for name in trainable}
        full = {**own, **leaves}
        seen = forward(step, world, full, images, positions, batch, noise)
        logits = step.logits(world, full, seen, batch, noise)
        loss = step.loss(world, full, logits, seen, batch, noise)
        if trainable:
            grads.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True))
        alone.append(loss.detach())
        batches.append(batch)
        noises.append(noise)
        tokens.append(images.tokens(positions))
    stacked = {name: torch.stack([own[name] for own in params]).detach() for name in params[0]}
    leaves = {name: stacked[name].requires_grad_() for name in trainable}
    folded = _folded_losses(step, world, backbone, {**stacked, **leaves}, batches, noises, tokens)
    torch.testing.assert_close(folded, torch.stack(alone), atol=1e-5, rtol=1e-5)
    if not trainable:
        return
    together = torch.autograd.grad(folded.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    for number, name in enumerate(trainable):
        separate = torch.stack([client[number] for client in grads])
        torch.testing.assert_close(together[number], separate, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _working_parameters(method: Method, tiny: Any) -> tuple[World, ViT, ClientRuntime, list[Tensors]]:
    made = experiment(tiny(), method)
    source, manifest, backbone, world = made.factory.prepare()
    server = Server(world.roles.shared, world.roles.server)
    bank = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )
    runtime = ClientRuntime(made.config, world, method, bank, ClientStates(lambda client: None), source.domain_names)
    if world.roles.statistics("start"):
        replies = [runtime.survey(client, method.download(world, server, client)) for client in range(world.clients)]
        uploads = [Upload(reply.client, reply.upload, 0.25) for reply in replies]
        server = method.survey(world, server, uploads)
    generator = torch.Generator().manual_seed(0)
    params = []
    for client in range(world.clients):
        who = runtime._client(client, 1)
        begun = method.begin(world, who, method.download(world, server, client), runtime._new(who))
        # heads start at zero, behind which nothing has a gradient
        params.append(
            {
                name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) if "head" in name else tensor
                for name, tensor in begun.items()
            }
        )
    return world, backbone, runtime, params


def _said(world: World, context: TextContext, tokens: Tensor, changes: Tensors) -> Tensor:
    """Features (N, C, D) of the contexts of N clients, or (N, B, C, D), image by image; client by client with changes."""
    text = world.text.with_names(context.names)
    if context.per_image:
        return torch.stack([text.encode(own, context.position) for own in tokens])
    if not changes:
        return text.encode(tokens, context.position)
    assert text.encode_unstored is not None
    each = [{name: value[client] for name, value in changes.items()} for client in range(len(tokens))]
    return torch.cat([text.encode_unstored(t[None], context.position, c) for t, c in zip(tokens, each, strict=True)])


def _folded_losses(
    step: Method,
    world: World,
    backbone: ViT,
    params: Tensors,
    batches: list[Batch],
    noises: list[Tensors],
    tokens: list[Tensor],
) -> Tensor:
    labels = torch.stack([batch.labels for batch in batches])
    features = {name: torch.stack([batch.features[name] for batch in batches]) for name in batches[0].features}
    noise = {name: torch.stack([each[name] for each in noises]) for name in noises[0]}
    clients, size = labels.shape
    plans: list[Any] = []

    def spread(slots: tuple[TokenPrompt, ...], rows: int) -> tuple[Tensor, ...]:
        return tuple(
            slot.tokens if slot.tokens.dim() == 4 else slot.tokens.expand(rows, *slot.tokens.shape) for slot in slots
        )

    def folded(tokens: tuple[Tensor, ...], plan: Prompts) -> list[TokenPrompt]:
        return [replace(slot, tokens=each.flatten(0, 1)) for each, slot in zip(tokens, plan.tokens, strict=True)]

    def ask(
        params: Tensors, labels: Tensor, features: Tensors, noise: Tensors
    ) -> tuple[tuple[Tensor, ...], Tensors, Tensors, Tensors, Tensors]:
        given = step.prompts(world, params, Batch(labels, features), noise)
        plans.append(given)
        contexts = {name: context.tokens for name, context in given.text.items()}
        return spread(given.tokens, given.repeat * size), contexts, given.extra, given.weights, given.text_weights

    slots, contexts, extra, weights, text_weights = torch.func.vmap(ask)(params, labels, features, noise)
    plan = plans[0]
    text = {name: _said(world, plan.text[name], tokens, text_weights) for name, tokens in contexts.items()}
    images = torch.stack(tokens).repeat(1, plan.repeat, 1, 1)  # (N, J * B, T, d)

    def ask_later(
        params: Tensors, cls: Tensor, labels: Tensor, features: Tensors, noise: Tensors
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        given = step.later(world, params, cls, Batch(labels, features), noise)
        plans.append(given)
        return spread(given.tokens, plan.repeat * size), given.extra

    def later(cls: Tensor) -> list[TokenPrompt]:
        joining, more = torch.func.vmap(ask_later)(params, cls.unflatten(0, (clients, -1)), labels, features, noise)
        extra.update(more)
        return folded(joining, plans[-1])

    pause = None if plan.pause is None else (plan.pause, later)
    if weights:  # a method that changes weights runs client by client; only its cheap parts are mapped
        alone = [
            backbone.with_added({name: value[client] for name, value in weights.items()}).run(
                images[client],
                [replace(slot, tokens=each[client]) for each, slot in zip(slots, plan.tokens, strict=True)],
                step.reads,
            )
            for client in range(clients)
        ]
        seen = {name: torch.stack([each[name] for each in alone]) for name in alone[0]}
    else:
        rows = torch.func.vmap(lambda *given: rows_of(step.prompts(world, given[0], Batch(*given[1:3]), given[3])))(
            params, labels, features, noise
        )
        changed = backbone.modulated({name: each.flatten(0, 1) for name, each in rows.items()}) if rows else backbone
        together = changed.run(images.flatten(0, 1), folded(slots, plan), step.reads, pause=pause)
        seen = {name: value.unflatten(0, (clients, plan.repeat * size)) for name, value in together.items()}

    def answer(
        params: Tensors, seen: Tensors, text: Tensors, extra: Tensors, labels: Tensor, features: Tensors, noise: Tensors
    ) -> Tensor:
        batch, looked = Batch(labels, features), Seen(**seen, text=text, extra=extra)
        logits = step.logits(world, params, looked, batch, noise)
        return step.loss(world, params, logits, looked, batch, noise)

    return torch.func.vmap(answer)(params, seen, text, extra, labels, features, noise)
