"""Clients as one batch: stacking, filling up, the size of a batch, and that one client cannot disturb another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import StopAfter, Stopped, experiment, local_tensors, run, seeded, shared_tensors

import fedprompt.client.local_training as local_training
from fedprompt.client import batched_clients
from fedprompt.client.batch_schedule import batch_schedule_of, in_order, shuffled
from fedprompt.client.batch_sizing import ENOUGH_ROWS, MOST_CLIENTS, BatchSizer, StepNeeds, shapes_of
from fedprompt.client.batched_clients import StackedParams, fill_up
from fedprompt.client.client_states import ClientStates
from fedprompt.core.method import Batch, Method, Prompts, Seen, World
from fedprompt.errors import ConfigError, ContractError, DivergenceError
from fedprompt.features.image_bank import ImageBank
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.methods.pfedbayespt import PFedBayesPT
from fedprompt.modules.contexts import TextContext
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

WORLD = World(8, 2, 5, 4, ("cat", "ox", "fly"), ("a", "b"))


def test_what_clients_have_in_common_is_not_stacked_unless_it_is_trained() -> None:
    same, own = torch.ones(2), [torch.zeros(3), torch.ones(3)]
    each = [{"same": same.detach(), "trained": same.detach(), "own": own[client]} for client in range(2)]
    stacked = StackedParams.of(each, ["trained"])
    assert set(stacked.common) == {"same"}
    assert {name: tuple(tensor.shape) for name, tensor in stacked.stacked.items()} == {
        "trained": (2, 2),
        "own": (2, 3),
    }
    for client in range(2):
        found = stacked.of_client(client)
        assert set(found) == set(each[client])
        assert all(torch.equal(found[name], tensor) for name, tensor in each[client].items())


def test_equal_numbers_in_two_places_are_not_taken_for_one_tensor() -> None:
    """Whether tensors are common is seen without reading them; a part of a tensor is not the whole."""
    whole = torch.arange(6.0)
    assert not StackedParams.of([{"x": torch.ones(2)}, {"x": torch.ones(2)}]).common
    assert not StackedParams.of([{"x": whole[:4].view(2, 2)}, {"x": whole[:4].view(2, 2).T}]).common


def test_changes_of_the_first_clients_leave_the_others_as_they_are() -> None:
    stacked = StackedParams.of([{"x": torch.full((1,), float(client))} for client in range(3)])
    changed = stacked.changed({"x": torch.tensor([[7.0], [8.0]])})
    assert changed.stacked["x"].flatten().tolist() == [7.0, 8.0, 2.0]
    assert stacked.first(2).changed({"new": torch.ones(2, 1)}).of_client(1)["new"].item() == 1.0


@pytest.mark.parametrize("other", [{"y": torch.zeros(2)}, {"x": torch.zeros(3)}, {"x": torch.zeros(2).double()}])
def test_clients_with_other_names_shapes_or_precision_are_not_alike(other: Tensors) -> None:
    assert shapes_of({"x": torch.zeros(2)}) == shapes_of({"x": torch.ones(2)})
    assert shapes_of({"x": torch.zeros(2)}) != shapes_of(other)


@given(
    count=st.integers(1, 40),
    size=st.integers(1, 16),
    epochs=st.integers(1, 3),
    steps=st.one_of(st.none(), st.integers(1, 5)),
)
def test_batches_are_those_of_a_plain_loop(count: int, size: int, epochs: int, steps: int | None) -> None:
    order = seeded()
    plain = [part for _ in range(epochs) for part in order.permutation(count).split(size)][:steps]
    for (positions, sizes), expected in (
        (shuffled({7: count}, size, epochs, steps, {7: seeded()})[7], plain),
        (in_order(count, size), list(torch.arange(count).split(size))),
    ):
        assert sizes == [len(part) for part in expected]
        for row, part in zip(positions, expected, strict=True):
            assert row[: len(part)].tolist() == part.tolist()
            assert set(row[len(part) :].tolist()) <= {part[0].item()}, "what fills up is of the same batch"


@dataclass(frozen=True)
class Held:
    """Images as a batch schedule sees them."""

    indices: np.ndarray
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.indices)


def test_a_timetable_knows_which_images_count_and_who_is_done() -> None:
    images: Any = [
        Held(np.arange(10, 15), torch.arange(5)),
        Held(np.arange(20, 22), torch.arange(2)),
    ]
    plans = shuffled({0: 5, 1: 2}, 2, 1, None, {0: seeded(1), 1: seeded(2)})
    table = batch_schedule_of(images, [plans[0], plans[1]])
    assert table.steps == 3
    assert [table.now(step) for step in range(3)] == [[2, 2], [2], [1]]
    seen = [table.indices[0, step, place].item() for step in range(3) for place in range(table.now(step)[0])]
    assert sorted(seen) == list(range(10, 15))
    assert torch.equal(table.labels[0] + 10, table.indices[0])
    assert sorted(table.indices[1, 0].tolist()) == [20, 21]
    wide = batch_schedule_of(images, [in_order(5, 8), in_order(2, 8)])
    assert wide.indices[1, 0].tolist() == [20, 21, 20, 20, 20]


@dataclass(frozen=True)
class Noisy(Method):
    """Draws with the images on the first, the last and a repeated axis, and one draw without images."""

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        shapes = {"first": (size, 2), "last": (3, size), "repeated": (4 * size, 2), "none": (2,)}
        return {name: generator.normal(*shape) for name, shape in shapes.items()}


def needs_of(method: Method) -> StepNeeds:
    one: Any = Held(np.arange(1), torch.zeros(1, dtype=torch.long))
    return BatchSizer(WORLD, "auto", drawn).of(method, {}, one, training=True)


def drawn(method: Method, size: int, training: bool, generator: Stream) -> Tensors:
    return method.noise(WORLD, size, training, generator)


def test_the_axis_of_the_images_is_found_and_filled_up() -> None:
    axes = needs_of(Noisy()).axes
    assert axes == {"first": (0, 1), "last": (1, 1), "repeated": (0, 4)}
    few, many = (Noisy().noise(WORLD, size, True, seeded(size)) for size in (2, 3))
    filled = fill_up([few, many], [2, 3], axes)
    assert {name: tuple(tensor.shape) for name, tensor in filled.items()} == {
        "first": (2, 3, 2),
        "last": (2, 3, 3),
        "repeated": (2, 12, 2),
        "none": (2, 2),
    }
    assert torch.equal(filled["first"][0, :2], few["first"])
    assert torch.equal(filled["last"][0, :, :2], few["last"])
    assert torch.equal(filled["repeated"][0].view(4, 3, 2)[:, :2], few["repeated"].view(4, 2, 2))
    for name, tensor in many.items():
        assert torch.equal(filled[name][1], tensor)


@dataclass(frozen=True)
class Odd(Method):
    """Draws in which no single axis goes over the images."""

    shape: str = "both"

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        shapes = {"both": (size, size), "half": (size // 2,), "more": (size + 1,)}
        return {self.shape: torch.zeros(shapes[self.shape])}


@pytest.mark.parametrize("shape", ["both", "half", "more"])
def test_draws_that_cannot_be_filled_up_are_refused(shape: str) -> None:
    with pytest.raises(ContractError, match=f"noise {shape!r} of Odd must have one axis over the images"):
        needs_of(Odd(shape))


@dataclass(frozen=True)
class Asks(Method):
    """Inserts so many tokens, so often, and speaks so many contexts."""

    tokens: int = 0
    draws: int = 1
    contexts: int = 0
    block: int = 0

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        slots = (TokenPrompt(torch.zeros(1, self.tokens, world.width), (self.block,)),)
        text = {str(number): TextContext(torch.zeros(4, 8)) for number in range(self.contexts)}
        return Prompts(tokens=slots, repeat=self.draws, text=text)


@pytest.mark.parametrize(
    ("method", "images", "expected"),
    [
        (Asks(), 32, MOST_CLIENTS),
        (Asks(tokens=3), 32, ENOUGH_ROWS // (32 * 8)),
        (Asks(tokens=3, draws=2), 32, ENOUGH_ROWS // (2 * 32 * 8)),
        (Asks(tokens=3), 1000, 1),
        (Asks(contexts=2), 32, ENOUGH_ROWS // (2 * 3 * 10)),
    ],
)
def test_clients_are_folded_until_a_pass_has_enough_rows(method: Method, images: int, expected: int) -> None:
    step_needs = needs_of(method)
    assert BatchSizer(WORLD, "auto", drawn).clients(step_needs, images) == min(expected, MOST_CLIENTS)
    assert BatchSizer(WORLD, 5, drawn).clients(step_needs, images) == 5
    assert BatchSizer(WORLD, 5, drawn).clients(replace(step_needs, foldable=False), images) == 1


def test_what_was_asked_before_does_not_decide_for_clients_that_look_different() -> None:
    """Else the first client a process meets would decide, and a resumed run would fold in another way."""

    @dataclass(frozen=True)
    class AsItIs(Method):
        def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
            return Prompts(tokens=(TokenPrompt(params["prompt"], (0,)),), repeat=1 if batch.training else 3)

    one: Any = Held(np.arange(1), torch.zeros(1, dtype=torch.long))
    short, long = ({"prompt": torch.zeros(1, rows, 8)} for rows in (2, 7))
    cases = [(short, True), (long, True), (short, False), (long, False)]
    found = []
    for order in (cases, cases[::-1]):
        sizer = BatchSizer(WORLD, "auto", drawn)
        rows = {
            (len(params["prompt"][0]), training): sizer.of(AsItIs(), params, one, training).per_image
            for params, training in order
        }
        found.append(rows)
    assert found[0] == found[1] == {(2, True): 7, (7, True): 12, (2, False): 21, (7, False): 36}


@pytest.mark.parametrize(
    ("method", "features"),
    [(Asks(), ("cls",)), (Asks(tokens=3, block=1), ("tokens:1",)), (Asks(contexts=1), ("cls",))],
)
def test_what_a_step_reads_of_the_images_is_known_before_it(method: Method, features: tuple[str, ...]) -> None:
    assert needs_of(method).features == features


def test_images_of_the_next_clients_are_decoded_ahead(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[str, ...]]] = []
    real = ImageBank.prefetch

    def watched(self: ImageBank, indices: torch.Tensor, names: tuple[str, ...]) -> None:
        asked.append((len(indices), tuple(names)))
        real(self, indices, names)

    monkeypatch.setattr(ImageBank, "prefetch", watched)
    values = settings(engine={"cohort": 4}, federation={"rounds": 1}, backbone={"name": "tiny", "image_size": 32})
    ahead = experiment(values, FedVPT(prompt_tokens=2))
    monkeypatch.setattr(BatchSizer, "clients", lambda self, step_needs, batch: 2)
    ahead.run()
    assert [names for _, names in asked] == [("tokens:0",)] * 2  # two clients of four, in training and in the test


def test_a_cohort_really_runs_as_one_batch(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = []
    real = batched_clients.losses_of_clients

    def watched(step: Method, world: World, params: StackedParams, *rest: Any) -> torch.Tensor:
        losses = real(step, world, params, *rest)
        folded.append(len(losses))
        return losses

    monkeypatch.setattr(local_training, "losses_of_clients", watched)
    run(settings(engine={"cohort": 4}, federation={"rounds": 1}), FedVPT(prompt_tokens=2))
    assert set(folded) == {4}
    folded.clear()
    run(settings(name="alone", engine={"cohort": 1}, federation={"rounds": 1}), FedVPT(prompt_tokens=2))
    assert folded == []


@dataclass(frozen=True)
class OneGoesAstray(FedVPT):
    """The head of the first client grows beyond all numbers."""

    def begin(self, world: World, client: Any, received: Tensors, local: Tensors) -> Tensors:
        params = super().begin(world, client, received, local)
        return {**params, "astray": torch.tensor(float("inf") if client.index == 0 else 1.0)}

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> torch.Tensor:
        return super().logits(world, params, seen, batch, noise) * params["astray"]


def test_a_client_that_goes_astray_does_not_disturb_those_beside_it(settings: Any) -> None:
    (first, *rest), (same, *others) = (replies(settings(engine={"cohort": cohort})) for cohort in (1, 4))
    assert isinstance(first, DivergenceError)
    assert isinstance(same, DivergenceError)
    assert str(first) == str(same)
    for reply, other in zip(rest, others, strict=True):
        assert reply.loss == pytest.approx(other.loss, rel=1e-5)
        for name, tensor in reply.upload.items():
            torch.testing.assert_close(tensor, other.upload[name], atol=1e-5, rtol=1e-5)


def replies(values: Any) -> list[Any]:
    """What four clients of which one goes astray answer in round 1."""
    made = experiment(values, OneGoesAstray(prompt_tokens=2))
    source, manifest, backbone, world = made.factory.prepare()
    bank = made.factory.bank(source, manifest, backbone)
    runtime = made.factory.client_runtime(source, world, bank, ClientStates(lambda client: None))
    return list(runtime.train_together(1, dict.fromkeys(range(4), world.roles.shared)))


@pytest.mark.parametrize("kind", ["label_flip", "free_rider", "sign_flip"])
def test_malicious_clients_do_the_same_in_a_cohort(kind: str, settings: Any) -> None:
    alone, stacked = (
        run(
            settings(name=f"by{cohort}", engine={"cohort": cohort}, attack={"kind": kind, "fraction": 0.5}),
            FedVPT(prompt_tokens=2),
        )
        for cohort in (1, 4)
    )
    assert_near(alone, stacked)


@pytest.mark.parametrize("noise_at", ["step", "client"])
def test_private_clients_draw_the_same_noise_in_a_cohort(noise_at: str, settings: Any) -> None:
    private = {"noise_at": noise_at, "noise": 0.1, "clip": 0.5}
    alone, stacked = (
        run(settings(name=f"by{cohort}", engine={"cohort": cohort}, privacy=private), FedVPT(prompt_tokens=2))
        for cohort in (1, 4)
    )
    assert_near(alone, stacked)


@pytest.mark.parametrize("at", ["global", "after_local"])
def test_clients_are_tested_alike_wherever_they_are_tested(at: str, settings: Any) -> None:
    alone, stacked = (
        run(
            settings(name=f"by{cohort}", engine={"cohort": cohort}, federation={"rounds": 1, "evaluate_at": at}),
            PFedBayesPT(prompt_tokens=2),
        )
        for cohort in (1, 4)
    )
    for client, result in alone.reader.evaluations(1).items():
        assert result["nll"] == pytest.approx(stacked.reader.evaluations(1)[client]["nll"], rel=1e-4)


@pytest.mark.parametrize("value", [0, -1, "many", 2.5])
def test_a_cohort_is_a_number_or_auto(value: Any, settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cohort"):
        experiment(settings(engine={"cohort": value}))


def assert_near(alone: Run, stacked: Run) -> None:
    for found, expected in [
        (shared_tensors(stacked), shared_tensors(alone)),
        *((local_tensors(stacked, client), local_tensors(alone, client)) for client in range(4)),
    ]:
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def test_a_run_that_is_resumed_with_another_cohort_says_so(settings: Any) -> None:
    with pytest.raises(Stopped):
        run(settings(engine={"cohort": 2}), FedVPT(prompt_tokens=2), StopAfter(1))
    done = run(settings(engine={"cohort": 1, "memory_gib": 1.0}), FedVPT(prompt_tokens=2), resume=True)
    notes = [detail for _, _, kind, detail in done.reader.events() if kind == "resumed"]
    assert notes == ['with other engine: {"cohort": 1, "compile": false}']
