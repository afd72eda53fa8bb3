"""Optimisers and learning-rate schedules for N clients at once, on tensors (N, ...) with the clients in front.

Each client takes the step that `torch.optim` would take for it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.recipe import Schedule, group_of, learning_rate, matching
from fedprompt.tensors import Tensors

EPSILON = 1e-8  # of Adam, as in torch


@dataclass(frozen=True)
class OptimizerState:
    """What an optimiser remembers from step to step, clients in front."""

    first: Tensors = field(default_factory=dict)
    """Velocity of SGD, first moment of Adam."""
    second: Tensors = field(default_factory=dict)
    """Second moment of Adam."""

    def of_first_clients(self, count: int) -> OptimizerState:
        """That of the clients that still take steps."""
        return OptimizerState(
            {name: value[:count] for name, value in self.first.items()},
            {name: value[:count] for name, value in self.second.items()},
        )


def optimizer_step(
    params: Tensors,
    grads: Tensors,
    state: OptimizerState,
    rates: Mapping[str, float | Tensor],
    train: TrainConfig,
    step: int = 0,
) -> tuple[Tensors, OptimizerState]:
    """Stepped tensors and the new state. A rate is a number, or one for each client (N,). Steps count from 0."""
    if train.clip_norm is not None:
        grads = clipped_by_group(grads, float(train.clip_norm))
    if train.optimizer == "sgd":
        return _sgd(params, grads, state, rates, train)
    return _adam(params, grads, state, rates, train, step)


def clipped_by_group(grads: Tensors, bound: float) -> Tensors:
    """Gradients whose norm over each group of tensors is at most the bound, client by client."""
    groups: dict[str, list[str]] = {}
    for name in grads:
        groups.setdefault(group_of(name), []).append(name)
    clipped: Tensors = {}
    for names in groups.values():
        squares = [grads[name].reshape(len(grads[name]), -1).square().sum(1) for name in names]
        scale = (bound / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        clipped |= {name: _times(grads[name], scale) for name in names}
    return {name: clipped[name] for name in grads}


def _sgd(
    params: Tensors, grads: Tensors, state: OptimizerState, rates: Mapping[str, float | Tensor], train: TrainConfig
) -> tuple[Tensors, OptimizerState]:
    """SGD with weight decay and heavy-ball momentum, of all tensors at once."""
    momentum, names = float(train.momentum), list(grads)
    before, slopes = [params[name] for name in names], list(grads.values())
    if train.weight_decay:
        slopes = list(torch._foreach_add(slopes, before, alpha=train.weight_decay))
    if momentum and state.first:
        slopes = list(torch._foreach_add(slopes, [state.first[name] for name in names], alpha=momentum))
    stepped = torch._foreach_sub(before, _scaled(slopes, [rates[name] for name in names]))
    velocity = dict(zip(names, slopes, strict=True)) if momentum else {}
    return dict(zip(names, stepped, strict=True)), OptimizerState(velocity)


def _scaled(slopes: list[Tensor], rates: Sequence[float | Tensor]) -> list[Tensor]:
    """Slopes times rates. The product is rounded before it is subtracted, whether clients have one rate or several:
    `alpha` of a subtraction would round once, and a resumed run could find other bits.
    """
    numbers = [rate for rate in rates if not isinstance(rate, Tensor)]
    if len(numbers) == len(rates):
        return list(torch._foreach_mul(slopes, numbers))
    return [_times(slope, rate) for slope, rate in zip(slopes, rates, strict=True)]


def _adam(
    params: Tensors,
    grads: Tensors,
    state: OptimizerState,
    rates: Mapping[str, float | Tensor],
    train: TrainConfig,
    step: int,
) -> tuple[Tensors, OptimizerState]:
    """Adam with weight decay in the gradient, or AdamW with weight decay beside it."""
    beta1, beta2 = train.betas
    correction1, correction2 = 1 - beta1 ** (step + 1), math.sqrt(1 - beta2 ** (step + 1))
    stepped, first, second = {}, {}, {}
    for name, grad in grads.items():
        value = params[name]
        if train.weight_decay and train.optimizer == "adam":
            grad = grad + train.weight_decay * value
        elif train.weight_decay:
            value = value - _times(value, rates[name]) * train.weight_decay
        before = state.first.get(name)
        first[name] = grad * (1 - beta1) if before is None else torch.lerp(before, grad, 1 - beta1)
        square = grad.square() * (1 - beta2)
        second[name] = square if before is None else torch.add(square, state.second[name], alpha=beta2)
        direction = first[name] / (second[name].sqrt() / correction2 + EPSILON)
        stepped[name] = value - _times(direction, rates[name]) / correction1
    return stepped, OptimizerState(first, second)


def _times(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """A tensor (N, ...) times a number, or times one number for each client (N,)."""
    if not isinstance(factor, Tensor):
        return tensor * factor
    return tensor * factor.to(tensor).view(-1, *[1] * (tensor.dim() - 1))


@dataclass(frozen=True)
class RateSchedule:
    """The learning rates of one stage: by tensor at the start, and how each client's change from step to step."""

    rates: dict[str, float]
    curves: dict[str, list[list[float]]]
    """Tensor -> client -> step -> factor on the rate. Tensors of one schedule share one list; tensors without change have none."""

    def at(self, step: int) -> dict[str, float | Tensor]:
        """Rates in a step, of the clients that still take steps."""
        factors: dict[int, Tensor] = {}
        found: dict[str, float | Tensor] = {}
        for name, rate in self.rates.items():
            curve = self.curves.get(name)
            if curve is None:
                found[name] = rate
                continue
            if id(curve) not in factors:
                factors[id(curve)] = torch.tensor([each[step] for each in curve if step < len(each)])
            found[name] = rate * factors[id(curve)]
        return found

    def sums(self, client: int, steps: int) -> dict[str, float]:
        """By tensor, the sum of the rates that a client took its steps with."""
        return {
            name: rate * (sum(self.curves[name][client]) if name in self.curves else steps)
            for name, rate in self.rates.items()
        }


def rate_schedule(
    train: TrainConfig,
    names: Sequence[str],
    begun: Tensors,
    steps: Sequence[int],
    epochs: int,
    round: int,
    rounds: int,
    fitting: bool,
) -> RateSchedule:
    """The rates of one stage with that many steps for each client, and with tensors that began the run as `begun`.

    Fitting before an evaluation is no part of the schedule over rounds: it starts at the full rates, without warm-up.
    """
    rates: dict[str, float] = {}
    curves: dict[str, list[list[float]]] = {}
    made: dict[tuple[str, float], list[list[float]]] = {}
    for name in names:
        base = learning_rate(train, name, begun)
        schedule = schedule_of(train, name)
        rates[name] = base * round_factor(schedule, 1 if fitting else round, rounds)
        warm = 0 if fitting else warm_epochs(train, schedule, round)
        if schedule != "local_cosine" and not warm:
            continue
        start = 0.0 if train.warmup_lr is None else _share(train.warmup_lr, rates[name])
        key = (schedule, start)
        if key not in made:
            made[key] = [step_factors(train, schedule, count, epochs, warm, start) for count in steps]
        curves[name] = made[key]
    return RateSchedule(rates, curves)


def _share(rate: float, of: float) -> float:
    return min(rate / of, 1.0) if of else 1.0


def schedule_of(train: TrainConfig, name: str) -> Schedule:
    """The schedule of one tensor: its group's, or the general one."""
    found: Schedule = matching(train.schedules, name) or train.schedule  # type: ignore[assignment]  # both are checked
    return found


def round_factor(schedule: Schedule, round: int, rounds: int) -> float:
    """What a cosine over the rounds makes of a rate."""
    return 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds)) if schedule == "cosine" else 1.0


def warm_epochs(train: TrainConfig, schedule: Schedule, round: int) -> int:
    """Epochs of warm-up in this round: of every participation with `local_cosine`, else of the whole run."""
    passed = 0 if schedule == "local_cosine" else (round - 1) * train.epochs
    return max(train.warmup_epochs - passed, 0)


def step_factors(
    train: TrainConfig, schedule: Schedule, steps: int, epochs: int, warm: int, start: float
) -> list[float]:
    """Factors on a client's rates in the steps of a stage: warm-up, then the curve of the schedule over the remaining steps.

    With `warmup_lr` the rate stays there during the warm-up, else it grows linearly from step to step.
    """
    heated = min(round(steps / max(epochs, 1) * warm), steps)
    factors = [start if train.warmup_lr is not None else (step + 1) / (heated + 1) for step in range(heated)]
    remaining = steps - heated
    if schedule == "local_cosine":
        return factors + [0.5 * (1 + math.cos(math.pi * step / remaining)) for step in range(remaining)]
    return factors + [1.0] * remaining
