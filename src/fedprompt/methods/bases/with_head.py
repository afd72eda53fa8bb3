"""Base of most methods on plain vision transformers: a linear head on the CLS row, local or shared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Method, Seen, Stage, World
from fedprompt.core.recipe import Recipe
from fedprompt.core.roles import Roles
from fedprompt.modules import heads
from fedprompt.tensors import Tensors


@dataclass(frozen=True)
class WithHead(Method):
    """A head that is local, or averaged like the rest and optionally tuned on a copy before an evaluation."""

    head: Literal["local", "shared", "shared_then_finetune"] = "local"
    """Where the head is kept."""
    finetune_epochs: Annotated[int, Field(ge=0)] = 5
    """Epochs on the head before an evaluation, with shared_then_finetune."""

    @property
    def recipe(self) -> Recipe:
        """One rate for heads and prompts. It falls over the rounds: a local head soon fits its few images."""
        return Recipe(lr=0.003, schedule="cosine")

    def with_head(self, world: World, roles: Roles) -> Roles:
        """The roles with a zero head added as local or shared."""
        head = heads.zero_head(world.classes, world.width, world.dtype, world.device)
        if self.head == "local":
            return replace(roles, local={**roles.local, **head})
        return replace(roles, shared={**roles.shared, **head})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return heads.read_head(params, seen.cls)

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        if self.head != "shared_then_finetune":
            return ()
        return (Stage(self, heads.NAMES, self.finetune_epochs, "finetune"),)
