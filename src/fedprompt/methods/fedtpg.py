"""FedTPG (Qiu et al., ICLR 2024): a network shared by all clients generates a client's context from its class names.

    N_c = g(c),   P = generator({N_c : c one of the client's classes}),   logits = scale * I g([P, name c])^T

Only the generator (`modules/context_generator.py`) is trained, and all of it is averaged. It reads names, not images,
so it can generate a context for classes that no client trained on.

As in the authors' code: N_c are features of the bare names, without words and without a full stop; the attention has
biases, and no residual around it; the training loss is a cross-entropy over the *client's own* classes only; and all
clients of a round count the same in the average, whatever their number of images. Each of these is a setting except the
biases. In tests logits cover all classes, as for every method here; the authors test a client among its own classes.

A client's classes are those of its training images. A client that has none of the given class names takes all names.
The generator works in the width d of the text tower, and only its keys and values read the shared space's D dimensions;
both are 512 for CLIP ViT-B/16. Deep text prompts and the optional self-attention of the authors' code are left out, as
in their experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import WithText, similarity
from fedprompt.modules.context_generator import generate, initial_generator
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

GENERATOR = "generator."
NAMES, KNOWN = "names", "known"  # features of all class names (C, D), and a mask of those that the generator reads (C,)
CANDIDATES = "candidates"  # a mask of the classes that training chooses from (C,)


@register("fedtpg")
@dataclass(frozen=True)
class FedTPG(WithText):
    """A shared network that turns class names into a context."""

    context_tokens: Annotated[int, Field(ge=1)] = 4
    """m, words of a context that the generator makes."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Heads of the generator's attention."""
    names: Literal["own", "all"] = "own"
    """Names the generator reads: those of the client's classes, or all."""
    name_words: str = ""
    """Words before the class names that the generator reads; empty for the bare names."""
    residual: bool = False
    """Add the queries to what they find, a residual around the attention."""
    training_classes: Literal["own", "all"] = "own"
    """Classes of the training loss: those of the client, or all."""
    averaging: Literal["uniform", "samples"] = "uniform"
    """Weights of clients in the average: all the same, or as `federation.weighting` says."""

    @property
    def weighs_evenly(self) -> bool:
        return self.averaging == "uniform"

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.class_specific:
            raise ConfigError(
                broken("method.class_specific", "be false: the generator makes one context", self.class_specific)
            )
        if world.text.width % self.heads:
            raise ConfigError(broken("method.heads", f"divide the text tower's width {world.text.width}", self.heads))

    def init(self, world: World, generator: Stream) -> Roles:
        made = initial_generator(self.new_context(world, generator), world.text.features, generator)
        return Roles(shared=prefixed(GENERATOR, world.placed(made)))

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        names = world.text.encode_words(self.name_words) if self.name_words else world.text.encode_names()
        masks = {KNOWN: _held(world, client, self.names), CANDIDATES: _held(world, client, self.training_classes)}
        return {**super().begin(world, client, received, local), NAMES: names, **masks}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        context = generate(stripped(GENERATOR, params), params[NAMES], params[KNOWN], self.heads, self.residual)
        return Prompts(text={"context": self.as_context(context)})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["context"])

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        if batch.training:
            logits = logits.masked_fill(params[CANDIDATES] == 0, -torch.inf)
        return super().loss(world, params, logits, seen, batch, noise)


def _held(world: World, client: Client, which: str) -> Tensor:
    """1 for the classes of the client's training images, or for all if it has none of these classes."""
    held = client.class_counts > 0
    if which == "all" or len(held) != world.classes or not held.any():
        held = torch.ones(world.classes)
    return held.to(world.device, world.dtype)
