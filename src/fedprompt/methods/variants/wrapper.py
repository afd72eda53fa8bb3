"""A wrapper that behaves like the method inside it until a variant overrides something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import (
    Batch,
    Client,
    Combine,
    Method,
    Mixture,
    Progress,
    Prompts,
    Seen,
    Server,
    Stage,
    Upload,
    World,
)
from fedprompt.core.recipe import Recipe
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError
from fedprompt.modules import heads
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

Named = TypeVar("Named")


@dataclass(frozen=True)
class Variant(Method):
    """Tensors that a variant adds have its prefix; the inner method never sees them."""

    inner: Method
    prefix: ClassVar[str] = "\0"

    def inside(self, world: World) -> World:
        """The world as the inner method declared it."""
        roles = world.roles
        return replace(
            world,
            roles=Roles(
                shared=self._not_own(roles.shared),
                local=self._not_own(roles.local),
                server=self._not_own(roles.server),
                stat=self._not_own(roles.stat),
            ),
        )

    def _not_own(self, named: dict[str, Named]) -> dict[str, Named]:
        return {name: value for name, value in named.items() if not name.startswith(self.prefix)}

    def wrapped(self, stage: Stage) -> Stage:
        """A stage of the inner method whose step this variant still sees."""
        return replace(stage, step=replace(self, inner=stage.step))

    @property
    def recipe(self) -> Recipe:
        return self.inner.recipe

    @property
    def uses_text(self) -> bool:
        return self.inner.uses_text

    @property
    def names_any_class(self) -> bool:
        return self.inner.names_any_class

    @property
    def starts_as_received(self) -> bool:
        return self.inner.starts_as_received

    @property
    def weighs_evenly(self) -> bool:
        return self.inner.weighs_evenly

    @property
    def sums_suffice(self) -> bool:
        return self.inner.sums_suffice

    @property
    def reads(self) -> tuple[str, ...]:
        return self.inner.reads

    @property
    def needs(self) -> tuple[str, ...]:
        return self.inner.needs

    def check(self, world: World, train: TrainConfig) -> None:
        self.inner.check(world, train)

    def init(self, world: World, generator: Stream) -> Roles:
        return self.inner.init(world, generator)

    def survey(self, world: World, server: Server, uploads: Sequence[Upload]) -> Server:
        return self._with_own(server, self.inner.survey(self.inside(world), self._without_own(server), uploads))

    def statistics(self, world: World, params: Tensors, batch: Batch, forward: Callable[[], Seen]) -> Tensors:
        return self.inner.statistics(self.inside(world), params, batch, forward)

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return self.inner.download(self.inside(world), self._without_own(server), client)

    def enrol(self, world: World, client: Client) -> Tensors:
        return self.inner.enrol(self.inside(world), client)

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return self.inner.begin(self.inside(world), client, received, local)

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return self.inner.personalise(self.inside(world), client, received, local)

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return tuple(self.wrapped(stage) for stage in self.inner.stages(self.inside(world), train))

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        return self.inner.noise(self.inside(world), size, training, generator)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return self.inner.prompts(self.inside(world), params, batch, noise)

    def later(self, world: World, params: Tensors, cls: Tensor, batch: Batch, noise: Tensors) -> Prompts:
        return self.inner.later(self.inside(world), params, cls, batch, noise)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return self.inner.logits(self.inside(world), params, seen, batch, noise)

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return self.inner.loss(self.inside(world), params, logits, seen, batch, noise)

    def after_step(self, world: World, params: Tensors, before: Tensors, step: int) -> Tensors:
        return self.inner.after_step(self.inside(world), params, before, step)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        return self.inner.finish(self.inside(world), client, received, params, progress)

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        inner = self.inner.aggregate(self.inside(world), self._without_own(server), uploads, combine)
        return self._with_own(server, inner)

    def _without_own(self, server: Server) -> Server:
        return replace(server, own=self._not_own(server.own))

    def _with_own(self, before: Server, after: Server) -> Server:
        """The inner method's result for the server, with the variant's own tensors unchanged."""
        own = {name: tensor for name, tensor in before.own.items() if name.startswith(self.prefix)}
        return replace(after, own={**after.own, **own})

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return self.inner.adaptation(self.inside(world), train)

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return tuple(self.wrapped(stage) for stage in self.inner.newcomer(self.inside(world), train, epochs))

    def predict(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return self.inner.predict(self.inside(world), params, seen, batch, noise)

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        return self.inner.diagnostics(self.inside(world), params, seen, batch)

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        return self.inner.mixtures(self.inside(world), params, seen, batch)


def squared_distance(params: Tensors, anchors: Tensors) -> Tensor:
    """Sum of squared differences over the anchored tensors; 0 without any."""
    return sum(((params[name] - anchor.detach()).square().sum() for name, anchor in anchors.items()), torch.zeros(()))


def require_shared(roles: Roles, variant: str) -> None:
    if not roles.shared:
        raise ConfigError(
            f"variant.name must be used with a method that shares tensors, got {variant!r} with one that shares none"
        )


def with_local_head(roles: Roles, variant: str) -> Roles:
    """The head moved from shared to local."""
    everything = {**roles.shared, **roles.local}
    if not all(name in everything for name in heads.NAMES):
        raise ConfigError(
            f"variant.name must be used with a method that has a head, got {variant!r} with one that has none"
        )
    shared = {name: tensor for name, tensor in roles.shared.items() if name not in heads.NAMES}
    head = {name: everything[name] for name in heads.NAMES}
    return replace(roles, shared=shared, local={**roles.local, **head})
