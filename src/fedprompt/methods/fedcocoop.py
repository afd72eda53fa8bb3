"""CoCoOp (Zhou et al., CVPR 2022, arXiv 2203.05557), averaged: a text context that a small network moves image by image.

    pi(x)      = W_2 relu(W_1 I(x) + b_1) + b_2            W_1 (D / r, D), W_2 (d, D / r), r = 16
    T_c(x)     = g([P_1 + pi(x), .., P_m + pi(x), name c])  the same pi(x) is added to all m words
    logits     = scale * <I(x), T_c(x)>,   local objective CE(logits, y),   P and the network are averaged

I(x) is the unit vector of the image without prompts. The paper trains on one data set; federated comparisons average
everything, and so does this. `start: zero` sets W_2 and b_2 to zero: then the first logits are those of PromptFL, and a
network that is not trained stays PromptFL to the bit. `start: random` is that of torch's linear layers, as in the
authors' code.

Every image has its own classes, so the text tower reads B * C sentences in a step, where PromptFL reads C: memory and
time grow with the batch. The authors therefore train with batches of one image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import WithText, precise
from fedprompt.modules.contexts import TextContext
from fedprompt.modules.init import linear_layer
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

META = "meta_net."


@register("fedcocoop")
@dataclass(frozen=True)
class FedCoCoOp(WithText):
    """An averaged text context that depends on the image."""

    reduction: Annotated[int, Field(ge=1)] = 16
    """r: the network's hidden layer has D / r units."""
    start: Literal["zero", "random"] = "zero"
    """Start of the network's last layer: zero (the first model is PromptFL), or random as in the authors' code."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",)

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.class_specific:
            rule = "be false: a context depends on the image, not on the class"
            raise ConfigError(broken("method.class_specific", rule, self.class_specific))
        if self.reduction > world.text.features:
            rule = f"be at most the {world.text.features} dimensions of the features"
            raise ConfigError(broken("method.reduction", rule, self.reduction))

    def init(self, world: World, generator: Stream) -> Roles:
        context = self.new_context(world, generator)
        width, hidden = world.text.features, world.text.features // self.reduction
        network = {
            **linear_layer("in", hidden, width, generator),
            **linear_layer("out", world.text.width, hidden, generator),
        }
        if self.start == "zero":
            network |= {name: torch.zeros_like(tensor) for name, tensor in network.items() if name.startswith("out")}
        return Roles(shared={"context": context, **world.placed(prefixed(META, network))})

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        moved = shift(stripped(META, params), batch.features["image"].to(params["context"].dtype))
        tokens = params["context"] + moved.unsqueeze(1)  # (B, m, d)
        return Prompts(text={"context": TextContext(tokens, self.class_position, per_image=True)})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity_by_image(world, seen.image, seen.text["context"])


def shift(network: Tensors, image: Tensor) -> Tensor:
    """pi(x) (B, d) of images (B, D)."""
    hidden = F.relu(F.linear(image, network["in.weight"], network["in.bias"]))
    return F.linear(hidden, network["out.weight"], network["out.bias"])


def similarity_by_image(world: World, image: Tensor, text: Tensor) -> Tensor:
    """Logits (B, C) of images (B, D) whose classes are (B, C, D), in at least float32."""
    return world.text.scale * torch.einsum("bd,bcd->bc", precise(image), precise(text)) + world.text.bias
