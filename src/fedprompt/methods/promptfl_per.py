"""PromptFL with FedPer's split (Arivazhagan et al., 2019) inside the context: only its first words are averaged.

    P_k = [G ; L_k],   G the first `shared_tokens` words,   G <- sum_k p_k G_k,   L_k never leaves client k

Both parts are trained together. With `alternate` the split is FedRep's (Collins et al., 2021): first L_k with G as
received, then G with the new L_k. The whole context is drawn at once and then cut, so `shared_tokens` = m is PromptFL
and 0 is CoOp, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Prompts, Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import AVERAGED_RATE, RATES
from fedprompt.methods.promptfl import PromptFL
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

SHARED, OWN = "shared.context", "own.context"


@register("promptfl_per")
@dataclass(frozen=True)
class PromptFLPer(PromptFL):
    """A text context whose first half is averaged."""

    rates: ClassVar[Mapping[str, float | str]] = {SHARED: AVERAGED_RATE, **RATES}

    shared_tokens: Annotated[int, Field(ge=0)] | None = None
    """First words of the context that are averaged; null for half."""
    alternate: bool = False
    """Train the local words first, then the shared ones, instead of all together."""
    own_epochs: Annotated[int, Field(ge=0)] | None = None
    """Epochs of the local words when alternating; null for train.epochs."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        tokens = self.context_length(world)
        if self.shared_tokens is not None and self.shared_tokens > tokens:
            rule = f"be at most the {tokens} tokens of the context"
            raise ConfigError(broken("method.shared_tokens", rule, self.shared_tokens))
        if self.own_epochs is not None and not self.alternate:
            raise ConfigError(broken("method.own_epochs", "be null unless method.alternate is true", self.own_epochs))

    def init(self, world: World, generator: Stream) -> Roles:
        context = self.new_context(world, generator)
        cut = self.context_length(world) // 2 if self.shared_tokens is None else self.shared_tokens
        return Roles(shared={SHARED: context[..., :cut, :].clone()}, local={OWN: context[..., cut:, :].clone()})

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        if not self.alternate:
            return super().stages(world, train)
        own_epochs = train.epochs if self.own_epochs is None else self.own_epochs
        return (Stage(self, (OWN,), own_epochs, "own"), Stage(self, (SHARED,), train.epochs))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return super().prompts(world, {"context": whole(params)}, batch, noise)


def whole(params: Tensors) -> Tensor:
    """The context (m, d) or (C, m, d) of both parts."""
    return torch.cat([params[SHARED], params[OWN]], dim=-2)
