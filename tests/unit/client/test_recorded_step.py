"""Steps that are recorded and played again: the same bits, and a refusal of what cannot be played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import content, run, seeded
from torch import Tensor

import fedprompt.client.local_training as local_training
from fedprompt.client.recorded_step import NotRecordable, Program, RecordedSteps, record
from fedprompt.core import registry
from fedprompt.core.method import cross_entropy
from fedprompt.methods.head_tune import HeadTune

pytestmark = pytest.mark.unit

CLIENTS, IMAGES, WIDTH, CLASSES = 3, 5, 6, 4


def inputs(seed: int) -> list[Tensor]:
    drawn = seeded(seed)
    labels = torch.tensor([[drawn.integer(CLASSES) for _ in range(IMAGES)] for _ in range(CLIENTS)])
    shapes = ((CLIENTS, CLASSES, WIDTH), (CLIENTS, CLASSES), (CLIENTS, IMAGES, WIDTH))
    return [*(drawn.normal(*shape) for shape in shapes), labels]


def slopes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Losses and gradients of a head, client by client under `vmap`."""
    weight, bias = (each.detach().requires_grad_() for each in tensors[:2])

    def loss(weight: Tensor, bias: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        mixed = torch.cat([x, x.tanh()], dim=0).view(2, *x.shape).mean(0)
        first, second = F.linear(mixed, weight, bias).split([1, CLASSES - 1], dim=-1)
        return cross_entropy(torch.cat([first, second], dim=-1), labels).mean()

    losses = torch.func.vmap(loss)(weight, bias, *tensors[2:])
    return [losses.detach(), *torch.autograd.grad(losses.sum(), [weight, bias])]


def test_a_played_step_has_the_bits_of_the_step_itself() -> None:
    results, program = record(slopes, inputs(0))
    assert all(map(torch.equal, results, slopes(inputs(0))))
    for seed in (0, 1, 2):
        assert all(map(torch.equal, program(inputs(seed)), slopes(inputs(seed))))
    assert not torch.equal(program(inputs(1))[0], program(inputs(2))[0])


def test_playing_a_step_leaves_no_trace_in_the_program() -> None:
    _, program = record(slopes, inputs(0))
    before = list(program.values)
    program(inputs(1))
    assert all(one is other for one, other in zip(before, program.values, strict=True))


def test_two_inputs_that_are_one_tensor_are_told_apart() -> None:
    same = torch.ones(3)
    _, program = record(lambda given: [given[0] - 2 * given[1]], [same, same])
    assert program([torch.full((3,), 5.0), torch.ones(3)])[0].tolist() == [3.0, 3.0, 3.0]


def test_what_is_computed_twice_is_done_once_and_what_nobody_reads_is_not_done() -> None:
    def step(given: Sequence[Tensor]) -> list[Tensor]:
        given[0].cosh()
        return [given[0].exp() + given[0].exp(), given[0].detach()]

    _, program = record(step, [torch.ones(2)])
    assert len(program.operations) == 2
    assert torch.equal(program([torch.zeros(2)])[0], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    "step",
    [
        lambda given: [given[0] * given[0].sum().item()],
        lambda given: [given[0] if given[0].sum() > 0 else -given[0]],
        lambda given: [given[0] + torch.rand(3)],
        lambda given: [given[0].add_(1.0)],
        lambda given: [given[0][given[0] > 0]],
    ],
    ids=["a number is read", "a branch", "a random draw", "an input is changed", "a shape that depends on values"],
)
def test_a_step_that_cannot_be_played_is_refused_and_runs_as_it_is(
    step: Callable[[Sequence[Tensor]], list[Tensor]],
) -> None:
    with pytest.raises(NotRecordable):
        record(step, [torch.tensor([1.0, -2.0, 3.0])])
    steps = RecordedSteps()
    for _ in range(4):
        torch.manual_seed(0)
        found = steps.run(("step",), step, [torch.tensor([1.0, -2.0, 3.0])])
        torch.manual_seed(0)
        assert torch.equal(found[0], step([torch.tensor([1.0, -2.0, 3.0])])[0])


def test_an_index_of_numbers_is_played_and_one_of_truths_is_not() -> None:
    numbers = torch.tensor([2, 0])
    _, program = record(lambda given: [given[0][given[1]]], [torch.ones(3), numbers])
    assert program([torch.arange(3.0), torch.tensor([1, 1])])[0].tolist() == [1.0, 1.0]
    with pytest.raises(NotRecordable):
        record(lambda given: [given[0][given[1]]], [torch.ones(3), torch.tensor([True, False, True])])


def test_other_shapes_and_other_steps_have_programs_of_their_own() -> None:
    steps = RecordedSteps()
    for _ in range(3):
        for count in (2, 3):
            found = steps.run(("twice",), lambda given: [2 * given[0]], [torch.ones(count)])
            assert found[0].tolist() == [2.0] * count
            found = steps.run(("thrice",), lambda given: [3 * given[0]], [torch.ones(count)])
            assert found[0].tolist() == [3.0] * count


@pytest.mark.parametrize("variant", ["none", *registry.variants()])
def test_a_run_with_recorded_steps_has_the_bits_of_one_without(
    variant: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head-Tune, whose steps need no pass, and every variant of it, with two epochs and batches of different sizes."""
    method = HeadTune()
    if variant != "none":
        method = registry.variants()[variant](inner=method)  # type: ignore[assignment, call-arg]
    played: list[int] = []
    play = Program.__call__

    def counted(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
        played.append(len(program.operations))
        return play(program, inputs)

    class Never(RecordedSteps):
        def run(self, key: tuple[Any, ...], step: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return step(inputs)

    monkeypatch.setattr(Program, "__call__", counted)
    digests = []
    for kind in (RecordedSteps, Never):
        monkeypatch.setattr(local_training, "RecordedSteps", kind)
        train = {"batch_size": 2, "epochs": 2, "momentum": 0.0 if variant == "scaffold" else 0.9}
        found = run(settings(name=kind.__name__, train=train, federation={"rounds": 3}), method)
        digests.append(content(found))
        assert played
    assert digests[0] == digests[1]


def test_a_constant_may_be_filled_in_until_something_reads_it() -> None:
    def masked(tensors: Sequence[Tensor]) -> list[Tensor]:
        mask = torch.zeros_like(tensors[0])
        mask.masked_fill_(torch.eye(3, dtype=torch.bool), 2.0)
        return [tensors[0] + mask]

    def too_late(tensors: Sequence[Tensor]) -> list[Tensor]:
        mask = torch.zeros_like(tensors[0])
        before = tensors[0] + mask
        mask.add_(1.0)
        return [before * mask]

    _, program = record(masked, [torch.ones(3, 3)])
    for seed in (1, 2):
        drawn = seeded(seed).normal(3, 3)
        assert torch.equal(program([drawn])[0], masked([drawn])[0])
    with pytest.raises(NotRecordable):
        record(too_late, [torch.ones(3, 3)])
