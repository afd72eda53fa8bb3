"""Ditto (Li et al., 2021): a personal copy of everything, kept near the shared tensors as received.

    shared part     the inner method, unchanged
    personal part   min over P_k of  CE(P_k) + lambda/2 ||P_k - P_g||^2,   P_g the shared tensors as received

Predictions use the personal copy. lambda = 0 is local-only training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Mixture, Progress, Prompts, Seen, Stage, World
from fedprompt.core.registry import register_variant
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.variants.wrapper import Variant, require_shared, squared_distance
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, pick, prefixed, stripped

PERSONAL = "ditto.personal."
ANCHOR = "ditto.anchor."


@register_variant("ditto")
@dataclass(frozen=True)
class Ditto(Variant):
    """A personal model beside the shared one."""

    prefix: ClassVar[str] = "ditto."
    lam: Annotated[float, Field(ge=0)] = 0.1
    """Lambda, strength of the pull towards the shared tensors."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = self.inner.init(world, generator)
        require_shared(roles, "ditto")
        return replace(roles, local={**roles.local, **prefixed(PERSONAL, {**roles.shared, **roles.local})})

    def enrol(self, world: World, client: Client) -> Tensors:
        own = super().enrol(world, client)
        return {**own, **prefixed(PERSONAL, own)}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        anchors = prefixed(ANCHOR, pick(received, world.roles.shared))
        return {**super().begin(world, client, received, local), **self._mine(local), **anchors}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = super().personalise(world, client, received, local)
        if client.index in world.newcomers:  # it never trained its copy
            return self._not_own(params)
        return {**params, **self._mine(local)}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        inside = self.inside(world)
        self._refuse_undeclared(inside, train)
        shared = tuple(replace(stage, name=f"shared.{stage.name}") for stage in self.inner.stages(inside, train))
        return (*shared, *self._personal(self.inner.stages(inside, train)))

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return self._personal(super().adaptation(world, train))

    def _personal(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """The same stages on the personal copies, which are used to predict."""
        return tuple(
            replace(self.wrapped(stage), trainable=tuple(PERSONAL + name for name in stage.trainable))
            for stage in stages
        )

    def _refuse_undeclared(self, inside: World, train: TrainConfig) -> None:
        """A copy can only be kept of what the inner method declared as shared or local."""
        trained = {name for stage in self.inner.stages(inside, train) for name in stage.trainable}
        for name in sorted(trained - {*inside.roles.shared, *inside.roles.local}):
            rule = "be used with a method that trains only its shared and local tensors"
            raise ConfigError(broken("variant.name", rule, f"ditto with one that trains {name!r}"))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return self.inner.newcomer(self.inside(world), train, epochs)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return super().prompts(world, self._view(params), batch, noise)

    def later(self, world: World, params: Tensors, cls: Tensor, batch: Batch, noise: Tensors) -> Prompts:
        return super().later(world, self._view(params), cls, batch, noise)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return super().logits(world, self._view(params), seen, batch, noise)

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        personal = self._view(params)
        plain = super().loss(world, personal, logits, seen, batch, noise)
        return plain + 0.5 * self.lam * squared_distance(personal, stripped(ANCHOR, params))

    def after_step(self, world: World, params: Tensors, before: Tensors, step: int) -> Tensors:
        return prefixed(PERSONAL, super().after_step(world, stripped(PERSONAL, params), self._view(before), step))

    def predict(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return super().predict(world, self._view(params), seen, batch, noise)

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        return super().diagnostics(world, self._view(params), seen, batch)

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        return super().mixtures(world, self._view(params), seen, batch)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        inside = self.inside(world)
        sent, kept = self.inner.finish(inside, client, received, self._view(params), progress)
        copy = pick({**sent, **kept}, (*inside.roles.shared, *inside.roles.local))
        return upload, {**local, **prefixed(PERSONAL, copy)}

    def _mine(self, tensors: Tensors) -> Tensors:
        return prefixed(PERSONAL, stripped(PERSONAL, tensors))

    def _view(self, params: Tensors) -> Tensors:
        """The parameters with the personal copies in place of the shared ones."""
        return {**params, **stripped(PERSONAL, params)}
