"""FedIns (Feng et al., ICCV 2023, arXiv 2308.06051): a shared pool of sets, from which every image picks its own.

    form ssf       a set is a scale gamma_o and a shift beta_o for every operation o of the frozen transformer, as published:
                   h <- gamma_o(x) * o(h) + beta_o(x) behind the embedding of patches, both norms, the maps to queries, keys
                   and values, the map out of the attention and both layers of every block, and the final norm
    form prompts   a set is `prompt_tokens` tokens for each prompted block, inserted as in FedVPT

    query    q = CLS of the pass without any of this
    picks    the k sets with the highest cos(q, key_i), image by image
    set      the mean of the picked sets; with a pool of heads, also logits(x) = mean of the picked heads' logits
    loss     (1 - lambda) CE + lambda (1 - sim),   sim = sum (as in the authors' code) or mean of the k cosines

Sets, keys and heads are shared and averaged. The authors weight clients equally: `federation.weighting: uniform`. The
choice is not differentiable, so keys learn only from sim. Keys start in uniformly random directions (our choice), heads at
zero (the authors': random). Prompts start as FedVPT's, so a pool of one set with lambda = 0 is FedVPT; scales start at
N(1, 0.02^2) and shifts at N(0, 0.02^2), as in the authors' code.

The authors train image by image and step after each; here a batch is one step, and every image has its own set in it.
Behind a stem, and where a norm stands between the embedding and block 0 (CLIP), the embedding is not scaled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Mixture, Prompts, Seen, Stage, World
from fedprompt.core.recipe import Recipe
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules import heads
from fedprompt.modules.insertion import PromptStart, TokenPrompt
from fedprompt.modules.prompt_keys import cosine
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, stripped

POOL = "pool."
SSF = "pool.ssf."
SPREAD = 0.02  # standard deviation of the first scales and shifts


@register("fedins")
@dataclass(frozen=True)
class FedIns(WithHead):
    """Every image picks its scales and shifts or its prompts, and its heads, from a shared pool."""

    form: Literal["prompts", "ssf"] = "prompts"
    """What a set is: prompt tokens, or a scale and a shift behind every operation, as published."""
    head: Literal["local", "shared", "shared_then_finetune"] = "shared"
    """Where the head, or the pool of heads, is kept."""
    pool: Annotated[int, Field(ge=1)] = 25
    """Number of sets in the pool."""
    picks: Annotated[int, Field(ge=1)] = 3
    """k, sets that an image picks."""
    prompt_tokens: Annotated[int, Field(ge=0)] = 10
    """K, tokens of a set at each prompted block, with form prompts."""
    depth: Annotated[int, Field(ge=1)] | None = None
    """Blocks that a set changes, counted from the first; null for all."""
    pool_heads: bool = True
    """Every set has its own head; otherwise there is one head."""
    key_weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Lambda, weight of the loss that pulls picked keys to their images."""
    prompt_init: PromptStart = "blank"
    """Initial prompts: tokens of a blank image, VPT's uniform ones, or zeros."""
    similarity: Literal["sum", "mean"] = "sum"
    """How the cosines of the picked keys are combined."""

    @property
    def recipe(self) -> Recipe:
        recommended = super().recipe
        return recommended if self.form == "prompts" else replace(recommended, lrs={SSF + "*": 0.001})

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
        sets = self._new_prompts(world, generator) if self.form == "prompts" else self._new_scales(world, generator)
        shared = {**sets, "pool.keys": generator.normal(self.pool, world.width)}
        roles = Roles(shared=world.placed(shared))
        return self.with_head(world, roles)

    def _new_prompts(self, world: World, generator: Stream) -> Tensors:
        depth = self.depth or world.blocks
        prompts = world.initial_prompt(self.prompt_init, [*range(depth)] * self.pool, self.prompt_tokens, generator)
        return {"pool.prompts": prompts.unflatten(0, (self.pool, depth))}

    def _new_scales(self, world: World, generator: Stream) -> Tensors:
        """(pool, 2, width) for each operation: a scale of about 1 and a shift of about 0."""
        found = {}
        for name, width in world.operations.items():
            block = name.split(".")[1] if name.startswith("blocks.") else None
            if self.depth is None or block is None or int(block) < self.depth:
                drawn = SPREAD * generator.normal(self.pool, 2, width)
                found[SSF + name] = drawn + torch.tensor([[1.0], [0.0]])
        return found

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
        similarity = best.sum(-1) if self.similarity == "sum" else best.mean(-1)
        extra = {"weights": weights, "similarity": similarity}
        if self.form == "ssf":
            pool = stripped(SSF, params)
            return Prompts(
                factors={o: torch.einsum("bp,psw->bsw", weights, each) for o, each in pool.items()}, extra=extra
            )
        tokens = torch.einsum("bp,plkd->blkd", weights, params["pool.prompts"])
        return Prompts(tokens=(TokenPrompt(tokens, tuple(range(tokens.shape[1]))),), extra=extra)

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
