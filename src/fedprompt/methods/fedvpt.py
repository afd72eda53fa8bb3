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

from fedprompt.config import TrainConfig
from fedprompt.method import Batch, Prompts, World
from fedprompt.methods.with_head import WithHead
from fedprompt.prompts.insertion import VisionPrompt, initial_prompt
from fedprompt.registry import register
from fedprompt.roles import Roles, Tensors


@register("fedvpt")
@dataclass(frozen=True)
class FedVPT(WithHead):
    """Shared prompts before the first block, carried through all of them."""

    prompt_tokens: Annotated[int, Field(ge=0)] = 10  #: K, learnable tokens per prompted block
    depth: Annotated[int, Field(ge=1)] | None = (
        1  #: blocks that get prompts of their own, counted from the first; null for all
    )
    after: Literal["carry", "drop"] = "carry"  #: what becomes of the prompts behind the last prompted block
    prompt_init: Literal["random", "zero"] = "random"  #: VPT's uniform start, or all zeros

    def check(self, world: World, train: TrainConfig) -> None:
        world.check_depth("method.depth", self.depth)

    def init(self, world: World, generator: torch.Generator) -> Roles:
        depth = self.depth or world.blocks
        prompt = initial_prompt(self.prompt_init, depth, self.prompt_tokens, world.width, world.patch, generator)
        return self.with_head(world, Roles(shared=world.placed({"prompt": prompt})))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        prompt = params["prompt"]
        return Prompts(vision=(VisionPrompt(prompt, tuple(range(len(prompt))), after=self.after),))


@register("fedvpt_deep")
@dataclass(frozen=True)
class FedVPTDeep(FedVPT):
    """Shared prompts of their own before every block."""

    depth: Annotated[int, Field(ge=1)] | None = (
        None  #: blocks that get prompts of their own, counted from the first; null for all
    )
