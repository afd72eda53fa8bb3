"""FedVPT and FedVPT-D: visual prompt tuning (Jia et al., 2022) with federated averaging of the prompts.

Tokens P in R^{depth x K x d} enter after the CLS token of the frozen ViT; client k minimises CE(head_k(CLS)) over P and
its head. The server averages P by sample count; the head is local, or shared and averaged too.

- `fedvpt` (shallow): K tokens before block 1, whose outputs pass through all blocks.
- `fedvpt_deep`: before each block the K prompt outputs of the block before are dropped and replaced by new parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Prompts, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules.insertion import PromptStart, TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("fedvpt")
@dataclass(frozen=True)
class FedVPT(WithHead):
    """Shared prompts before the first block, carried through all of them."""

    prompt_tokens: Annotated[int, Field(ge=0)] = 10
    """K, learnable tokens per prompted block."""
    depth: Annotated[int, Field(ge=1)] | None = 1
    """Blocks that get prompts of their own, counted from the first; null for all."""
    after: Literal["carry", "drop"] = "carry"
    """What happens to the prompts after the last prompted block."""
    prompt_init: PromptStart = "blank"
    """Initial prompts: tokens of a blank image, VPT's uniform ones, or zeros."""

    def check(self, world: World, train: TrainConfig) -> None:
        world.check_depth("method.depth", self.depth)

    def init(self, world: World, generator: Stream) -> Roles:
        depth = self.depth or world.blocks
        prompt = world.initial_prompt(self.prompt_init, range(depth), self.prompt_tokens, generator)
        return self.with_head(world, Roles(shared=world.placed({"prompt": prompt})))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        prompt = params["prompt"]
        return Prompts(tokens=(TokenPrompt(prompt, tuple(range(len(prompt))), after=self.after),))


@register("fedvpt_deep")
@dataclass(frozen=True)
class FedVPTDeep(FedVPT):
    """New shared prompts before every block."""

    depth: Annotated[int, Field(ge=1)] | None = None
    """Blocks that get prompts of their own, counted from the first; null for all."""
