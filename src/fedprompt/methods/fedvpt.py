"""FedVPT and FedVPT-D: visual prompt tuning (Jia et al., 2022) with federated averaging of the prompts.

Tokens P in R^{depth x K x d} enter behind the CLS token of the frozen ViT; client k minimises CE(head_k(CLS)) over P and
its head. The server averages P by sample count; the head is the client's own, or shared and averaged too.

- `fedvpt` (shallow): K tokens before block 1, whose outputs travel through all blocks.
- `fedvpt_deep`: before each block the K prompt outputs of the block before are thrown away and replaced by fresh parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.errors import ConfigError, broken
from fedprompt.method import Batch, Method, Prompts, Seen, World
from fedprompt.prompts.heads import read_head, zero_head
from fedprompt.prompts.insertion import VisionPrompt, vpt_init
from fedprompt.registry import register
from fedprompt.roles import Roles, Tensors


@register("fedvpt")
@dataclass(frozen=True)
class FedVPT(Method):
    """Shared prompts before the first block, carried through all of them."""

    prompt_tokens: Annotated[int, Field(ge=0)] = 10  #: K, learnable tokens per prompted block
    depth: Annotated[int, Field(ge=1)] | None = (
        1  #: blocks that get prompts of their own, counted from the first; null for all
    )
    after: Literal["carry", "drop"] = "carry"  #: what becomes of the prompts behind the last prompted block
    head: Literal["local", "shared"] = "local"  #: who owns the head

    def check(self, world: World, train: TrainConfig) -> None:
        if self.depth is not None and self.depth > world.blocks:
            raise ConfigError(
                broken("method.depth", f"be at most the {world.blocks} blocks of the backbone", self.depth)
            )

    def init(self, world: World, generator: torch.Generator) -> Roles:
        depth = self.depth or world.blocks
        prompt = vpt_init(depth, self.prompt_tokens, world.width, world.patch, generator).to(world.device, world.dtype)
        head = zero_head(world.classes, world.width, world.dtype, world.device)
        if self.head == "shared":
            return Roles(shared={"prompt": prompt, **head})
        return Roles(shared={"prompt": prompt}, local=head)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        prompt = params["prompt"]
        return Prompts(vision=(VisionPrompt(prompt, tuple(range(len(prompt))), after=self.after),))

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return read_head(params, seen.cls)


@register("fedvpt_deep")
@dataclass(frozen=True)
class FedVPTDeep(FedVPT):
    """Shared prompts of their own before every block."""

    depth: Annotated[int, Field(ge=1)] | None = (
        None  #: blocks that get prompts of their own, counted from the first; null for all
    )
