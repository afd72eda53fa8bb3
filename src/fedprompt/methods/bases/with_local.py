"""Base of methods with a global text context and local tensors.

The context is averaged. Local tensors never leave their client and are trained whenever it takes part. A client that
never took part has no useful local tensors yet: it predicts with `untrained`, by default with the global context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Progress, Prompts, Stage, World
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_text import WithText
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

TRAINED = "trained"  # 1 once the client has taken part


@dataclass(frozen=True)
class WithLocal(WithText):
    """A shared context `context` beside local tensors."""

    def own(self, world: World, context: torch.Tensor, generator: Stream) -> Tensors:
        """Initial local tensors, given the initial global context."""
        raise NotImplementedError(f"{type(self).__name__}.own")

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        """Replaces `local` for a client that never took part, so that only the global context predicts."""
        raise NotImplementedError(f"{type(self).__name__}.untrained")

    def init(self, world: World, generator: Stream) -> Roles:
        context = self.new_context(world, generator)
        trained = torch.zeros((), dtype=world.dtype, device=world.device)
        return Roles(shared={"context": context}, local={**self.own(world, context, generator), TRAINED: trained})

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        names = (*world.roles.shared, *world.roles.local)
        return (Stage(self, tuple(name for name in names if name != TRAINED), train.epochs),)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        return upload, {**local, TRAINED: torch.ones_like(local[TRAINED])}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        if not local[TRAINED]:
            local = {**local, **self.untrained(received, local)}
        return self.begin(world, client, received, local)


@dataclass(frozen=True)
class WithLocalContext(WithLocal):
    """The local tensor is a second context, `local_context`. Both are read and trained together."""

    def own(self, world: World, context: torch.Tensor, generator: Stream) -> Tensors:
        return {"local_context": self.new_context(world, generator)}

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        return {"local_context": received["context"]}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return Prompts(text={name: self.as_context(params[name]) for name in ("context", "local_context")})
