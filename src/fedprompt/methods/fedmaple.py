"""FedMaPLe and FedVLP: prompts for the text tower and the image tower, all averaged.

The text context P (m, d_t) stands with every class name; prompts V_j (m, d_v) enter the image tower before each of its
first J blocks and replace those of the block before. After block J they are kept.

    coupling `maple`        V_j = P W_j^T + b_j      MaPLe (Khattak et al., CVPR 2023): made of the text context
    coupling `independent`  V_j is a prompt itself   IVLP and FedVLP: each tower has its own prompts

    T_c = g([P, name c]),   I_b = f([image b, V]),   local objective CE(scale * I T^T, y),   plain federated averaging of everything

Vision prompts start as the tokens of a blank image, which leave the features of an image nearly as they were: V_j itself,
or b_j beside a random W_j. With `vision_start: random` they start as in the public code, like any linear layer or N(0,
0.02^2).

MaPLe also puts prompts into deeper layers of the *text* tower and couples the vision prompt of layer j to the text
prompt of layer j. That is left out: our text towers take prompts at their input only, so deep text prompts are not
inserted, and all J maps read the one context P. At J = 1 the two are the same model. With ViT-B/16, m = 2 and J = 9
there are 3,546,880 numbers to train and to send; MaPLe has 3,555,072, the difference being its 8 deep text prompts of 2
x 512.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Prompts, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import RATES
from fedprompt.methods.promptfl import PromptFL
from fedprompt.modules.contexts import random_context
from fedprompt.modules.init import linear_layer
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

MAPLE_DEPTH = 9


@register("fedmaple")
@dataclass(frozen=True)
class FedMaPLe(PromptFL):
    """Text and vision prompts averaged over clients. MaPLe begins with `context_words: a photo`."""

    rates: ClassVar[Mapping[str, float | str]] = RATES

    coupling: Literal["maple", "independent"] = "maple"
    """Vision prompts are linear maps of the text context, or independent prompts."""
    vision_tokens: Annotated[int, Field(ge=0)] | None = None
    """Vision tokens per prompted block; null for the context's length, the only value that coupling maple allows."""
    vision_depth: Annotated[int, Field(ge=1)] | None = None
    """J, number of blocks with vision prompts; null for MaPLe's nine, or all blocks of a smaller tower."""
    vision_start: Literal["blank", "random"] = "blank"
    """Start of the maps' biases, or of independent prompts: tokens of a blank image, or random."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        world.check_depth("method.vision_depth", self.vision_depth)
        if self.coupling == "independent":
            return
        if self.class_specific:
            raise ConfigError(broken("method.class_specific", "be false with coupling maple", self.class_specific))
        if self.vision_tokens not in (None, self.context_length(world)):
            rule = f"be the {self.context_length(world)} of the context, or null, with coupling maple"
            raise ConfigError(broken("method.vision_tokens", rule, self.vision_tokens))

    def init(self, world: World, generator: Stream) -> Roles:
        shared = super().init(world, generator).shared
        depth = self.vision_depth or min(MAPLE_DEPTH, world.blocks)
        if self.coupling == "maple":
            shared |= _new_maps(depth, world.text.width, world.width, generator)
            if self.vision_start == "blank":
                shared["coupling.bias"] = world.initial_prompt("blank", range(depth), 1, generator).squeeze(1)
        else:
            tokens = self.context_length(world) if self.vision_tokens is None else self.vision_tokens
            shared |= {"vision": self._new_prompts(depth, tokens, world, generator)} if tokens else {}
        return Roles(shared=world.placed(shared))

    def _new_prompts(self, depth: int, tokens: int, world: World, generator: Stream) -> Tensor:
        if self.vision_start == "blank":
            return world.initial_prompt("blank", range(depth), tokens, generator)
        return random_context(tokens, world.width, generator, depth)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        text = super().prompts(world, params, batch, noise).text
        if self.coupling == "independent" and self.vision_tokens == 0:
            return Prompts(text=text)
        vision = self._coupled(params) if self.coupling == "maple" else params["vision"]
        return Prompts(text=text, tokens=(TokenPrompt(vision, tuple(range(len(vision)))),))

    def _coupled(self, params: Tensors) -> Tensor:
        """V (J, m, d_v)."""
        mapped = torch.einsum("jvt,mt->jmv", params["coupling.weight"], params["context"])
        return mapped + params["coupling.bias"].unsqueeze(1)


def _new_maps(depth: int, text_width: int, width: int, generator: Stream) -> Tensors:
    """J linear maps from the text tower's width to the image tower's, uniform in ±1 / sqrt(d_t) as in torch."""
    return linear_layer("coupling", width, text_width, generator, stacked=(depth,))
