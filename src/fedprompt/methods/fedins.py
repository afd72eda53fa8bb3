"""A pool of prompts from which every image picks, after FedIns (Feng et al., ICCV 2023, arXiv 2308.06051).

FedIns keeps a pool of scale-and-shift sets (SSF: gamma * h + beta after every operation) for a frozen ViT. Here
*prompts replace scale and shift*: a set is `prompt_tokens` tokens for each prompted block, inserted as in FedVPT. The
choice of sets is unchanged:

    query    q = CLS of the pass without prompts
    picks    the k sets with the highest cos(q, key_i), image by image
    prompt   P(x) = mean of the picked sets; with a pool of heads, also logits(x) = mean of the picked heads' logits
    loss     (1 - lambda) CE + lambda (1 - sim),   sim = sum (as in the authors' code) or mean of the k cosines

Sets, keys and heads are shared and averaged. The authors weight clients equally: `federation.weighting: uniform`. The
choice is not differentiable, so keys learn only from sim. Keys start in uniformly random directions (our choice); sets
start as FedVPT's prompts and heads at zero, so a pool of one set with lambda = 0 is FedVPT.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Mixture, Prompts, Seen, Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules import heads
from fedprompt.modules.insertion import PromptStart, TokenPrompt
from fedprompt.modules.prompt_keys import cosine
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

POOL = "pool."


@register("fedins")
@dataclass(frozen=True)
class FedIns(WithHead):
    """Every image picks its prompts, and its heads, from a shared pool."""

    head: Literal["local", "shared", "shared_then_finetune"] = "shared"
    """Where the head, or the pool of heads, is kept."""
    pool: Annotated[int, Field(ge=1)] = 25
    """Number of prompt sets in the pool."""
    picks: Annotated[int, Field(ge=1)] = 3
    """k, sets that an image picks."""
    prompt_tokens: Annotated[int, Field(ge=0)] = 10
    """K, tokens of a set at each prompted block."""
    depth: Annotated[int, Field(ge=1)] | None = None
    """Blocks that a set prompts, counted from the first; null for all."""
    pool_heads: bool = True
    """Every set has its own head; otherwise there is one head."""
    key_weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Lambda, weight of the loss that pulls picked keys to their images."""
    prompt_init: PromptStart = "blank"
    """Initial prompts: tokens of a blank image, VPT's uniform ones, or zeros."""
    similarity: Literal["sum", "mean"] = "sum"
    """How the cosines of the picked keys are combined."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cls",)

    @property
    def head_names(self) -> tuple[str, ...]:
        return tuple(POOL + name for name in heads.NAMES) if self.pool_heads else heads.NAMES

    def check(self, world: World, train: TrainConfig) -> None:
        if self.picks > self.pool:
            raise ConfigError(broken("method.picks", f"be at most the {self.pool} sets of the pool", self.picks))
        world.check_depth("method.depth", self.depth)

    def init(self, world: World, generator: Stream) -> Roles:
        depth = self.depth or world.blocks
        prompts = world.initial_prompt(self.prompt_init, [*range(depth)] * self.pool, self.prompt_tokens, generator)
        shared = {
            "pool.prompts": prompts.unflatten(0, (self.pool, depth)),
            "pool.keys": generator.normal(self.pool, world.width),
        }
        roles = Roles(shared=world.placed(shared))
        return self.with_head(world, roles)

    def with_head(self, world: World, roles: Roles) -> Roles:
        if not self.pool_heads:
            return super().with_head(world, roles)
        head = heads.zero_head(world.classes, world.width, world.dtype, world.device)
        pool = {POOL + name: tensor.repeat(self.pool, *[1] * tensor.dim()) for name, tensor in head.items()}
        if self.head == "local":
            return replace(roles, local={**roles.local, **pool})
        return replace(roles, shared={**roles.shared, **pool})

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        likeness = cosine(batch.features["cls"], params["pool.keys"])
        best, picked = likeness.topk(self.picks, dim=-1)
        weights = torch.zeros_like(likeness).scatter(-1, picked, 1 / self.picks)  # (B, pool)
        tokens = torch.einsum("bp,plkd->blkd", weights, params["pool.prompts"])
        similarity = best.sum(-1) if self.similarity == "sum" else best.mean(-1)
        slot = TokenPrompt(tokens, tuple(range(tokens.shape[1])))
        return Prompts(tokens=(slot,), extra={"weights": weights, "similarity": similarity})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        if not self.pool_heads:
            return super().logits(world, params, seen, batch, noise)
        every = torch.einsum("bd,pcd->bpc", seen.cls, params["pool.head.weight"]) + params["pool.head.bias"]
        return torch.einsum("bp,bpc->bc", seen.extra["weights"], every)

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        return (1 - self.key_weight) * plain + self.key_weight * (1 - batch.mean(seen.extra["similarity"]))

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        likeness = cosine(batch.features["cls"], params["pool.keys"])
        names = tuple(f"set {number}" for number in range(self.pool))
        return (Mixture("sets of the pool", names, likeness, "cosine of query and key", seen.extra["weights"] > 0),)

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return self._on_heads(super().adaptation(world, train))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return self._on_heads(super().newcomer(world, train, epochs))

    def _on_heads(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(replace(stage, trainable=self.head_names) for stage in stages)
