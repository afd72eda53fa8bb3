"""FedLoRA: low-rank adaptation with federated averaging of the factors (FedIT; Zhang et al., 2023, arXiv 2305.05644).

The query and value projections W of each block become W + (alpha / r) B A, with A (r, d) and B (d, r); B starts at
zero, so the first forward pass is the frozen one. Client k minimises CE(head_k(CLS)) over A, B and its head, and the
server averages A and B by sample count.

That is inexact: with shares p_k, (sum_k p_k B_k)(sum_k p_k A_k) is not sum_k p_k B_k A_k unless the clients agree in
one of the factors. `ffa_lora` and `flora_stacked` solve this in two ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Prompts, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules.lora import Target, attention_changes, initial_factors, product
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("fedlora")
@dataclass(frozen=True)
class FedLoRA(WithHead):
    """Shared low-rank changes of the attention weights; their two factors are averaged separately."""

    rank: Annotated[int, Field(ge=1)] = 8
    """r, rank of each change."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Changes are multiplied by alpha / r."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("q", "v")
    """Projections that are changed: q, k, v."""
    depth: Annotated[int, Field(ge=1)] | None = None
    """Blocks that are changed, from the first; null for all."""

    def check(self, world: World, train: TrainConfig) -> None:
        if self.rank > world.width:
            raise ConfigError(broken("method.rank", f"be at most the width {world.width} of the backbone", self.rank))
        world.check_depth("method.depth", self.depth)
        if len(set(self.targets)) < len(self.targets):
            raise ConfigError(broken("method.targets", "name each projection once", list(self.targets)))

    def factors(self, world: World, rank: int, generator: Stream) -> Tensors:
        """A new pair of stacked factors whose product is zero."""
        a, b = initial_factors(self.depth or world.blocks, len(self.targets), rank, world.width, generator)
        return world.placed({"lora.a": a, "lora.b": b})

    def init(self, world: World, generator: Stream) -> Roles:
        return self.with_head(world, Roles(shared=self.factors(world, self.rank, generator)))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        change = self.alpha / self.rank * product(params["lora.a"], params["lora.b"])
        return Prompts(weights=attention_changes(change, self.targets))
