"""pFedMMA (Ghiasvand et al., ICLR 2026, arXiv 2507.05394): adapters beside the blocks of both towers, with a middle part
that both towers and all clients share.

Beside block l of each tower o, image or text, whose input is z:

    block(z) + alpha * Up_o,l relu(M_l relu(Down_o,l LN(z)))

LN is the norm in front of the block's attention. Down (r, d_o) and Up (d_o, r) belong to a tower and stay at their client;
M (r, r) is one for both towers of block l, and the only part that is sent and averaged. All maps have biases.

    T_c = g("a photo of a" c),   logits = scale * <f(x), T_c>,   local objective CE(logits, y)

alpha = 0 is zero-shot classification. The towers of one CLIP have equally many blocks; where they have not, blocks are
paired from the last one. A tower whose blocks normalise their output (BERT, of `mini` and `b16`) has its adapter before
that norm, and it reads z as it is.

As in the authors' code, maps start at N(0, 2 / rows) with biases of zero, and adapters are beside the last two thirds of
the blocks. Its alpha is 0.001, and on the way back it divides the gradient by alpha, so that adapters learn as with alpha
= 1. Adam's steps do not depend on that factor; `scale` and the rate go together. A step changes weights, so clients train
one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Method, Prompts, Seen, Stage, World
from fedprompt.core.recipe import Recipe
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import PLAIN_WORDS, check_words, similarity
from fedprompt.modules.contexts import TextContext
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

TOWERS = ("image", "text")
MIDDLE = "middle."


@register("pfedmma")
@dataclass(frozen=True)
class PFedMMA(Method):
    """Local adapters in both towers around a shared middle part."""

    words: Annotated[str, Field(min_length=1)] = PLAIN_WORDS
    """Words before the class name."""
    width: Annotated[int, Field(ge=1)] = 32
    """r, width of the adapters."""
    blocks: Annotated[int, Field(ge=1)] | None = None
    """Blocks with an adapter, from the last one; null for two thirds of those of the shallower tower."""
    scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Alpha, factor on what an adapter adds. The authors have 0.001, and gradients that do not feel it."""

    @property
    def recipe(self) -> Recipe:
        return Recipe(lr=0.001, schedule="cosine")

    @property
    def uses_text(self) -> bool:
        return True

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image",)

    def check(self, world: World, train: TrainConfig) -> None:
        check_words(world, "words", self.words)
        world.check_blocks()
        shallower = min(world.blocks, world.text.depth)
        if self.blocks is not None and self.blocks > shallower:
            rule = f"be at most the {shallower} blocks of the shallower tower"
            raise ConfigError(broken("method.blocks", rule, self.blocks))

    def count(self, world: World) -> int:
        """Blocks of a tower that have an adapter."""
        return self.blocks or max(1, round(min(world.blocks, world.text.depth) * 2 / 3))

    def init(self, world: World, generator: Stream) -> Roles:
        many = self.count(world)
        local: Tensors = {}
        for tower, width in zip(TOWERS, (world.width, world.text.width), strict=True):
            local |= new_map(f"{tower}.down", many, self.width, width, generator)
            local |= new_map(f"{tower}.up", many, width, self.width, generator)
        shared = new_map(MIDDLE.removesuffix("."), many, self.width, self.width, generator)
        return Roles(shared=world.placed(shared), local=world.placed(local))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        context = TextContext(world.text.words(self.words))
        image, text = (self.beside(params, tower, self._depth(world, tower)) for tower in TOWERS)
        return Prompts(text={"context": context}, weights=image, text_weights=text)

    def _depth(self, world: World, tower: str) -> int:
        return world.blocks if tower == "image" else world.text.depth

    def beside(self, params: Tensors, tower: str, depth: int) -> Tensors:
        """The adapters of a tower's last blocks. Alpha is multiplied into the last map."""
        found = {}
        for number in range(len(params["middle.weight"])):
            block = f"blocks.{depth - len(params['middle.weight']) + number}.adapter."
            for part in ("weight", "bias"):
                found[f"{block}down.{part}"] = params[f"{tower}.down.{part}"][number]
                found[f"{block}middle.{part}"] = params[f"middle.{part}"][number]
                found[f"{block}up.{part}"] = self.scale * params[f"{tower}.up.{part}"][number]
        return found

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["context"])

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        """A new client trains the parts of its own."""
        return (Stage(self, tuple(world.roles.local), epochs, "newcomer"),)


def new_map(name: str, many: int, rows: int, columns: int, generator: Stream) -> Tensors:
    """Linear maps, one for each of several blocks, at N(0, 2 / rows), with biases of zero."""
    drawn = (2 / rows) ** 0.5 * generator.normal(many, rows, columns)
    return {f"{name}.weight": drawn, f"{name}.bias": torch.zeros(many, rows)}
