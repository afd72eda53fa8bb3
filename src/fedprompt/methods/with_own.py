"""The part methods with a global text context and something of each client's own share.

The context is averaged; what is a client's own never leaves it, and is trained whenever the client takes part. A client that never
took part has nothing of its own worth using yet: what it predicts with is up to `untrained`, which takes the global context's word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprompt.config import TrainConfig
from fedprompt.method import Batch, Client, Progress, Prompts, Stage, World
from fedprompt.methods.with_text import WithText
from fedprompt.roles import Roles, Tensors

TRAINED = "trained"  #: 1 once the client has taken part


@dataclass(frozen=True)
class WithOwn(WithText):
    """A shared context `context` beside local tensors."""

    def own(self, world: World, context: torch.Tensor, generator: torch.Generator) -> Tensors:
        """Local tensors at their start, given the global context at its."""
        raise NotImplementedError(f"{type(self).__name__}.own")

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        """In place of `local`, for a client that never took part: such that the global context alone predicts."""
        raise NotImplementedError(f"{type(self).__name__}.untrained")

    def init(self, world: World, generator: torch.Generator) -> Roles:
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
class WithOwnContext(WithOwn):
    """What is a client's own is a second context, `local_context`. Both are read and trained together."""

    def own(self, world: World, context: torch.Tensor, generator: torch.Generator) -> Tensors:
        return {"local_context": self.new_context(world, generator)}

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        return {"local_context": received["context"]}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return Prompts(text={name: self.as_context(params[name]) for name in ("context", "local_context")})
