"""Per-FedAvg (Fallah et al., 2020, arXiv 2002.07948), first order, on prompts: meta-learning.

Local steps come in pairs, each on the next two batches, theta being the prompts and the head:

    look ahead   theta' = theta - alpha grad f_1(theta)
    step         theta  <- theta - beta grad f_2(theta')

The second derivatives that an exact gradient of f_2(theta'(theta)) has are left out. beta is the tensor's own learning
rate and alpha = inner_ratio * beta. A look-ahead without a partner at the end of local training is discarded: a client
uploads theta, and keeps it when its head is local. Pairs may span epochs. Before an evaluation a temporary copy takes
`adaptation_steps` steps of size alpha; a held-out client takes them too before it tunes its head.

With inner_ratio = 0 this is FedVPT on every second batch. Momentum and weight decay have no meaning across a pair and
are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Client, Progress, Stage, World
from fedprompt.core.recipe import PLAIN_SGD, Recipe
from fedprompt.core.registry import register
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.modules import heads
from fedprompt.tensors import Tensors, pick, prefixed, stripped

START = "start."  # theta, while the plain names may hold theta'


@register("per_fedavg")
@dataclass(frozen=True)
class PerFedAvg(FedVPTDeep):
    """First-order meta-learning of prompts and head."""

    head: Literal["local", "shared", "shared_then_finetune"] = "shared"
    """Where the head is kept."""
    inner_ratio: Annotated[float, Field(ge=0)] = 1.0
    """Alpha divided by beta."""
    adaptation_steps: Annotated[int, Field(ge=0)] = 1
    """Steps of size alpha before an evaluation."""

    @property
    def recipe(self) -> Recipe:
        """Plain SGD: a step of Adam has no look-ahead of the same size."""
        return PLAIN_SGD

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if train.optimizer != "sgd":
            raise ConfigError(broken("train.optimizer", "be sgd with method per_fedavg", train.optimizer))
        for name in ("momentum", "weight_decay"):
            if getattr(train, name):
                raise ConfigError(broken(f"train.{name}", "be 0 with method per_fedavg", getattr(train, name)))

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = super().begin(world, client, received, local)
        return {**params, **prefixed(START, params)}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return super().begin(world, client, received, local)

    def after_step(self, world: World, params: Tensors, before: Tensors, step: int) -> Tensors:
        if step % 2 == 0:
            return {**scaled(params, before, self.inner_ratio), **prefixed(START, pick(before, params))}
        moved = {name: before[START + name] + (stepped - before[name]) for name, stepped in params.items()}
        return {**moved, **prefixed(START, moved)}

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        return super().finish(world, client, received, stripped(START, params), progress)

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        tuning = self.finetune_epochs if self.head == "shared_then_finetune" else 0
        return (self._adapt(world), self._tune_head(tuning, "finetune"))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return (self._adapt(world), self._tune_head(epochs, "newcomer"))

    def _adapt(self, world: World) -> Stage:
        trainable = (*world.roles.shared, *world.roles.local)
        steps = self.adaptation_steps  # an epoch has at least one
        return Stage(self._one_by_one(self.inner_ratio), trainable, steps, "adaptation", steps=steps)

    def _tune_head(self, epochs: int, name: str) -> Stage:
        return Stage(self._one_by_one(1.0), heads.NAMES, epochs, name)

    def _one_by_one(self, ratio: float) -> OneByOne:
        return OneByOne(**{**vars(self), "inner_ratio": ratio})


@dataclass(frozen=True)
class OneByOne(PerFedAvg):
    """The same model, whose steps are not paired but shortened by the ratio."""

    def after_step(self, world: World, params: Tensors, before: Tensors, step: int) -> Tensors:
        return scaled(params, before, self.inner_ratio)


def scaled(params: Tensors, before: Tensors, ratio: float) -> Tensors:
    """The step from `before` to `params`, this many times as long."""
    return {name: before[name] + ratio * (stepped - before[name]) for name, stepped in params.items()}
