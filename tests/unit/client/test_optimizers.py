"""Optimisers, clipping by group and schedules of the learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprompt.client.optimizers import OptimizerState, clipped_by_group, optimizer_step, rate_schedule
from fedprompt.config import TrainConfig, parse
from fedprompt.core.recipe import PLAIN, Recipe, group_of, resolve
from fedprompt.errors import ConfigError

pytestmark = pytest.mark.unit


def train_config(**values: Any) -> TrainConfig:
    """Training settings as a run has them, without any `auto`."""
    return resolve(TrainConfig(**{"lr": 1.0, "momentum": 0.0, **values}), PLAIN)


def one_step(grads: dict[str, Tensor], rates: dict[str, float | Tensor], **values: Any) -> dict[str, Tensor]:
    zeros = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    return optimizer_step(zeros, grads, OptimizerState(), rates, train_config(**values))[0]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params, decay: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=decay),
    "adam": lambda params, decay: torch.optim.Adam(params, lr=0.3, weight_decay=decay),
    "adamw": lambda params, decay: torch.optim.AdamW(params, lr=0.3, weight_decay=decay),
}


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_equals_torchs_for_each_of_several_clients(name: str, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(3, 6, generator=generator), torch.randn(5, 3, 6, generator=generator)
    train = train_config(optimizer=name, momentum=0.9, weight_decay=decay)
    ours, state = {"x": start}, OptimizerState()
    for step, grad in enumerate(grads):
        ours, state = optimizer_step(ours, {"x": grad}, state, {"x": 0.3}, train, step)
    for client in range(3):
        theirs = torch.nn.Parameter(start[client].clone())
        optimizer = OPTIMIZERS[name]([theirs], decay)
        for grad in grads:
            theirs.grad = grad[client].clone()
            optimizer.step()
        torch.testing.assert_close(ours["x"][client], theirs.detach(), rtol=1e-6, atol=1e-6)


def test_the_state_of_clients_that_are_done_is_dropped() -> None:
    state = OptimizerState({"x": torch.arange(3.0)}, {"x": torch.arange(3.0) + 10})
    kept = state.of_first_clients(2)
    assert (kept.first["x"].tolist(), kept.second["x"].tolist()) == ([0.0, 1.0], [10.0, 11.0])


def test_a_large_gradient_of_one_group_does_not_shorten_the_step_of_another() -> None:
    """One norm over all would leave the prompt 1/780 of its step."""
    grads = {"fusion.query": torch.full((1, 1), 780.0), "global_text": torch.full((1, 1), 1.0)}
    clipped = clipped_by_group(grads, 1.0)
    torch.testing.assert_close(clipped["fusion.query"], torch.ones(1, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(clipped["global_text"], torch.ones(1, 1), atol=1e-5, rtol=0)


def test_clipping_bounds_the_norm_over_the_tensors_of_a_group_client_by_client() -> None:
    grads = {"head.weight": torch.tensor([[3.0], [0.3]]), "head.bias": torch.tensor([[4.0], [0.4]])}
    stepped = one_step(grads, {"head.weight": 1.0, "head.bias": 1.0}, clip_norm=1.0)
    torch.testing.assert_close(stepped["head.weight"], torch.tensor([[-0.6], [-0.3]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(stepped["head.bias"], torch.tensor([[-0.8], [-0.4]]), atol=1e-5, rtol=0)


def test_a_single_number_can_be_trained_and_clipped() -> None:
    stepped = one_step({"x": torch.tensor([5.0, 0.5])}, {"x": 1.0}, clip_norm=1.0)
    torch.testing.assert_close(stepped["x"], torch.tensor([-1.0, -0.5]), atol=1e-5, rtol=0)


def test_every_client_steps_by_a_rate_of_its_own() -> None:
    stepped = one_step({"x": torch.ones(2, 3)}, {"x": torch.tensor([0.5, 0.1])})
    torch.testing.assert_close(stepped["x"], torch.tensor([[-0.5] * 3, [-0.1] * 3]))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("prompt", "prompt"),
        ("encoder.mean.in.weight", "encoder"),
        ("ditto.personal.head.bias", "ditto.personal.head"),
    ],
)
def test_the_group_of_a_tensor_is_the_first_part_of_its_name(name: str, group: str) -> None:
    assert group_of(name) == group


def rates_at(step: int, round: int = 1, steps: tuple[int, ...] = (4,), epochs: int = 2, **values: Any) -> list[float]:
    """The rates of the tensor `x` of every client that still takes steps."""
    schedule = rate_schedule(train_config(**values), ["x"], {}, steps, epochs, round, 10, fitting=False)
    found = schedule.at(step)["x"]
    return found.tolist() if isinstance(found, Tensor) else [found] * len(steps)


def test_a_local_cosine_falls_over_the_steps_of_a_participation() -> None:
    found = [rates_at(step, round=7, schedule="local_cosine")[0] for step in range(4)]
    assert found == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


def test_the_cosine_starts_full_and_is_half_in_the_middle() -> None:
    found = [rates_at(0, round=round, lr=2.0, schedule="cosine")[0] for round in (1, 6, 10)]
    assert found == pytest.approx([2.0, 1.0, 1 + math.cos(math.pi * 0.9)])


def test_warm_up_grows_linearly_over_the_first_epochs_of_the_run() -> None:
    """Two epochs of two steps a round: three epochs of warm-up end in the middle of round 2."""
    assert [rates_at(step, warmup_epochs=1)[0] for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert [rates_at(step, round=2, warmup_epochs=1)[0] for step in range(4)] == [1.0] * 4


def test_warm_up_can_stay_at_a_rate_of_its_own_and_returns_in_every_participation_of_a_local_cosine() -> None:
    values: dict[str, Any] = {"warmup_epochs": 1, "warmup_lr": 1e-5, "schedule": "local_cosine"}
    for round in (1, 5):
        found = [rates_at(step, round=round, **values)[0] for step in range(4)]
        assert found == pytest.approx([1e-5, 1e-5, 1.0, 0.5])


def test_clients_with_fewer_steps_have_a_curve_of_their_own() -> None:
    assert rates_at(1, steps=(4, 2), schedule="local_cosine") == pytest.approx([0.8535534, 0.5])
    assert rates_at(3, steps=(4, 2), schedule="local_cosine") == pytest.approx([0.1464466])


def test_a_group_has_a_schedule_of_its_own() -> None:
    train = train_config(schedule="constant", schedules={"head.*": "cosine"})
    found = rate_schedule(train, ["prompt", "head.bias"], {}, [4], 1, 6, 10, fitting=False).at(0)
    assert found == {"prompt": 1.0, "head.bias": pytest.approx(0.5)}


def test_fitting_before_an_evaluation_starts_at_the_full_rates() -> None:
    train = train_config(schedule="cosine", warmup_epochs=3)
    assert rate_schedule(train, ["x"], {}, [4], 1, 9, 10, fitting=True).at(0) == {"x": 1.0}


def test_the_sum_of_the_rates_of_a_client_counts_its_own_steps() -> None:
    constant = rate_schedule(train_config(lr=0.5), ["x"], {}, [4, 2], 1, 1, 10, fitting=False)
    assert [constant.sums(0, 4), constant.sums(1, 2)] == [{"x": 2.0}, {"x": 1.0}]
    falling = rate_schedule(train_config(schedule="local_cosine"), ["x"], {}, [4], 1, 1, 10, fitting=False)
    assert falling.sums(0, 4)["x"] == pytest.approx(2.5)


def test_the_first_matching_pattern_sets_the_rate_also_inside_the_names_of_a_variant() -> None:
    train = train_config(lrs={"head.bias": 3.0, "head.*": 2.0})
    names = ["prompt", "head.weight", "head.bias", "ditto.personal.head.weight"]
    found = rate_schedule(train, names, {}, [1], 1, 1, 10, fitting=False).at(0)
    assert list(found.values()) == [1.0, 2.0, 3.0, 2.0]


RECIPE = Recipe(lr=0.002, lrs={"head.*": 0.01, "gate.*": 0.003}, optimizer="adam", schedule="cosine", clip_norm=2.0)


def test_auto_takes_the_recipe_of_the_method() -> None:
    found = resolve(TrainConfig(), RECIPE)
    assert (found.optimizer, found.lr, found.lrs) == ("adam", 0.002, RECIPE.lrs)
    assert (found.schedule, found.clip_norm, found.momentum) == ("cosine", 2.0, 0.9)


def test_what_the_user_sets_stays_and_comes_before_the_recipe() -> None:
    found = resolve(TrainConfig(lrs={"gate.*": 0.5}, schedule="constant", clip_norm=None), RECIPE)
    assert list(found.lrs.items()) == [("gate.*", 0.5), ("head.*", 0.01)]
    assert (found.schedule, found.clip_norm, found.lr) == ("constant", None, 0.002)


def test_a_number_as_rate_means_sgd_as_in_earlier_configs() -> None:
    found = resolve(TrainConfig(lr=0.05, lrs={"head.*": 0.01}), RECIPE)
    assert (found.optimizer, found.lr, found.momentum) == ("sgd", 0.05, 0.9)
    assert (found.schedule, found.clip_norm, found.lrs) == ("constant", None, {"head.*": 0.01})


def test_rates_of_adam_are_no_rates_for_sgd() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr must be a number where train\.optimizer is not"):
        resolve(TrainConfig(optimizer="sgd"), RECIPE)


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(TrainConfig(), RECIPE)
    assert resolve(once, RECIPE) == once


def test_a_relative_rate_is_a_share_of_the_root_mean_square_that_a_tensor_began_with() -> None:
    train = train_config(lr=0.5, lrs={"context": "40%"})
    begun = {"context": torch.tensor([[3.0, 4.0]]), "local.context": torch.empty(0, 2), "gate": torch.ones(1)}
    found = rate_schedule(train, tuple(begun), begun, [1], 1, 1, 10, fitting=False).at(0)
    assert found == {"context": pytest.approx(0.4 * 12.5**0.5), "local.context": 0.0, "gate": 0.5}


@pytest.mark.parametrize("rate", ["40", "-4%", "%", "40 %"])
def test_a_rate_that_is_neither_a_number_nor_a_share_is_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.lrs\.context"):
        parse({"train": {"lrs": {"context": rate}}})


def test_a_step_has_the_same_bits_whether_clients_have_one_rate_or_several() -> None:
    """Else a resumed run, whose clients share other passes, could end with other bits."""
    draws = torch.Generator().manual_seed(0)
    params, grads = (
        {"a": torch.randn(3, 5, 7, generator=draws), "b": torch.randn(3, 4, generator=draws)} for _ in range(2)
    )
    train = train_config(momentum=0.9, weight_decay=0.01)

    def stepped(rates: dict[str, float | Tensor], clients: slice) -> dict[str, Tensor]:
        own, slopes = ({name: tensor[clients] for name, tensor in each.items()} for each in (params, grads))
        first, state = optimizer_step(own, slopes, OptimizerState(), rates, train)
        return optimizer_step(first, slopes, state, rates, train)[0]

    several = stepped({"a": torch.tensor([0.1, 0.03, 0.1]), "b": torch.tensor([0.3, 0.1, 0.3])}, slice(0, 3))
    one: dict[str, float | Tensor] = {"a": 0.1, "b": 0.3}
    alone = [stepped(one, slice(place, place + 1)) for place in (0, 2)]
    together = stepped(one, slice(0, 3))
    for place, own in zip((0, 2), alone, strict=True):
        for name, tensor in own.items():
            assert torch.equal(tensor[0], several[name][place])
            assert torch.equal(tensor[0], together[name][place])
