"""What a method recommends for its training, and how `train.lr: auto` becomes numbers.

A recipe names an optimiser and a learning rate for every group of tensors: head, prompt, encoder, gate, ... `resolve` puts it
into the training settings, so that a run file always holds the numbers that were used, never the word `auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from fedprompt.config import TrainConfig
from fedprompt.errors import ConfigError, broken

if TYPE_CHECKING:
    from torch import Tensor

Optimizer = Literal["sgd", "adam", "adamw"]
Schedule = Literal["constant", "cosine", "local_cosine"]


@dataclass(frozen=True)
class Recipe:
    """Recommended training of a method. Rates belong to its optimiser: those of Adam are no rates for SGD."""

    lr: float = 0.003
    """Learning rate of every tensor that `lrs` does not name."""
    lrs: Mapping[str, float | str] = field(default_factory=dict)
    """Learning rates by name pattern of tensors, such as `head.*`; `30%` is a share of the tensor's size."""
    optimizer: Optimizer = "adam"
    momentum: float = 0.9
    """Of SGD."""
    schedule: Schedule = "constant"
    clip_norm: float | None = None
    """Largest norm of the gradient of each group of tensors."""


PLAIN = Recipe(lr=0.01, optimizer="sgd")  # what `train.lr: NUMBER` means where nothing else is said

PLAIN_SGD = Recipe(lr=0.1, lrs={"head.*": 0.01}, optimizer="sgd", momentum=0.0)  # for rules that divide by SGD's rates


def resolve(train: TrainConfig, recipe: Recipe) -> TrainConfig:
    """The settings with every `auto` replaced.

    A number as `train.lr` means SGD unless `train.optimizer` says otherwise. Patterns in `train.lrs` come before those of the recipe.
    """
    if train.lr != "auto":
        recipe = PLAIN
    elif train.optimizer not in ("auto", recipe.optimizer):
        rule = f"be a number where train.optimizer is not the recommended {recipe.optimizer}"
        raise ConfigError(broken("train.lr", rule, f"auto with {train.optimizer}"))
    recommended = {
        "optimizer": recipe.optimizer,
        "lr": recipe.lr,
        "momentum": recipe.momentum,
        "schedule": recipe.schedule,
        "clip_norm": recipe.clip_norm,
    }
    found: dict[str, object] = {name: value for name, value in recommended.items() if getattr(train, name) == "auto"}
    if train.lr == "auto":
        found["lrs"] = {**train.lrs, **{name: rate for name, rate in recipe.lrs.items() if name not in train.lrs}}
    return train.model_copy(update=found)


def matching(patterns: Mapping[str, float | str], name: str) -> float | str | None:
    """The value of the first pattern that matches a tensor: `head.*` is also the head inside `ditto.personal.head.bias`."""
    parts = name.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return next(
        (value for pattern, value in patterns.items() if any(fnmatchcase(tail, pattern) for tail in tails)), None
    )


def learning_rate(train: TrainConfig, name: str, start: Mapping[str, Tensor]) -> float:
    """The rate of one tensor: its group's, or the general one.

    A relative rate is a share of the root mean square that the tensor has in `start`. Adam changes every number by about
    the rate in a step, and how large the numbers are that a frozen tower knows differs from tower to tower.
    """
    found = matching(train.lrs, name)
    if isinstance(found, str):
        return float(found.removesuffix("%")) / 100 * _size(start[name])
    return float(train.lr if found is None else found)


def _size(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def group_of(name: str, prefixes: tuple[str, ...] = ("ditto.personal.",)) -> str:
    """The group of a tensor: `encoder` of `encoder.mean.in.weight`. A variant's copies form groups of their own."""
    for prefix in prefixes:
        if name.startswith(prefix):
            return prefix + group_of(name.removeprefix(prefix))
    return name.split(".")[0]
