"""pFedPT (Li et al., 2023, arXiv 2303.08678): a prompt that knows its client, and a classifier for all.

    form tokens    logits = head(CLS of [CLS, P_k, patches]),    P_k (K, d) local
    form pixels    logits = head(CLS of x + F_k),                F_k (3, S, S) local, a frame: 0 but for `border` pixels

    round    the head arrives; P_k or F_k is trained with the head fixed; then the head is trained with it fixed, and sent

The paper's prompt is the frame, and what is averaged is a whole network that is trained. Here the network is a frozen
transformer; of it only the head is trained. So both forms keep the paper's division and its order of training, and not its
size of what travels. Pixels are those of normalised images at the size that the backbone sees; an embedding of patches is
linear, so the frame adds its own patches to those of every image, which are computed once.

With tokens the model is FedVPT's; only the roles are exchanged: there the prompt is shared and the head may be local. With
`prompt_epochs: 0` the prompt stays at its common start. With a frame that stays at zero it is Head-Tune. A frame of pixels
needs an image: for sentences, behind a stem and with a norm before block 0 (CLIP) it is refused.

A frame starts at zero, or with `prompt_init: random` at N(0, 1), as in the authors' code. Theirs is 2 pixels wide around
images of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Prompts, Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.modules import heads
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

CHANNELS = 3


@register("pfedpt")
@dataclass(frozen=True)
class PFedPT(FedVPT):
    """A local prompt that tells a shared head about its client."""

    form: Literal["tokens", "pixels"] = "tokens"
    """The prompt: tokens before the first block, or a frame of pixels around the image, as published."""
    border: Annotated[int, Field(ge=1)] = 8
    """Width of the frame in pixels of the backbone's image."""
    head: Literal["shared", "shared_then_finetune"] = "shared"
    """The head is shared; it may be tuned before an evaluation."""
    prompt_epochs: Annotated[int, Field(ge=0)] | None = None
    """Epochs on the prompt in a round, before those on the head; null for train.epochs."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.form == "pixels" and not world.frame:
            rule = "be tokens where no pixels can be added: for sentences, behind a stem, or on CLIP's image tower"
            raise ConfigError(broken("method.form", rule, self.form))
        if self.form == "pixels" and 2 * self.border > world.frame:
            rule = f"be at most half of the {world.frame} pixels of an image"
            raise ConfigError(broken("method.border", rule, self.border))

    def init(self, world: World, generator: Stream) -> Roles:
        if self.form == "pixels":
            size = (CHANNELS, world.frame, world.frame)
            drawn = generator.normal(*size) if self.prompt_init == "random" else torch.zeros(size)
            head = self.with_head(world, Roles()).shared
            return Roles(shared=head, local=world.placed({"prompt": drawn * frame(world.frame, self.border)}))
        roles = super().init(world, generator)
        head = {name: roles.shared[name] for name in heads.NAMES}
        return Roles(shared=head, local={"prompt": roles.shared["prompt"]})

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        if self.form == "tokens":
            return super().prompts(world, params, batch, noise)
        return Prompts(pixels=params["prompt"] * frame(world.frame, self.border).to(params["prompt"]))

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        epochs = train.epochs if self.prompt_epochs is None else self.prompt_epochs
        prompt = (Stage(self, ("prompt",), epochs, "prompt"),) if epochs else ()
        return (*prompt, Stage(self, heads.NAMES, train.epochs))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        """A new client gets the head and trains its own prompt."""
        return (Stage(self, ("prompt",), epochs, "newcomer"),)


def frame(size: int, border: int) -> Tensor:
    """1 for the pixels (size, size) near an edge, 0 inside."""
    found = torch.ones(size, size)
    found[border : size - border, border : size - border] = 0
    return found
