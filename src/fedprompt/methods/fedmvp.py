"""FedMVP (Singha et al., ICCV 2025, arXiv 2504.20860): prompts of the image tower, made image by image of its patches and of
the attributes of all classes.

a_1..a_J are sentences, "a photo of a NAME, ATTRIBUTE", some for each class; t_j = g(a_j) are their frozen features. A network
phi that all clients share, the PromptFormer, asks them with the patches E(x) (M, d) that enter block 0:

    X  = W_O MHA(q = LN(E(x)),  k = v = LN(W t + b)) + b_O       every patch looks for attributes; no residual
    Y  = X + W_2 (u * gelu(w)) + b_2,   (u, w) = W_1 LN(X) + b_1
    P  = means of Y over n runs of consecutive patches            (n, d)
    V  = P / |P| * mean |E(x)|                                    the prompts of this image before block 0

    T_c    = mean of t_j over the attributes of class c           logits_c = scale * <I, T_c>,   I = f([x, V])
    loss   = CE(logits, y) + alpha (scale / 100)^2 mean (1 - cos(I, I0)),       I0 the image without prompts

phi and W are all that is trained; every client has the same weight in their average. The texts are fixed and the classes
enter as attributes only, so a trained phi serves other classes. The reduction of FedTPG's network is the same with learned
queries, names for attributes and words for prompts.

With `prompt_init: blank` W_O and W_2 begin at zero and b_O as the token of a blank image, with a root mean square of 1: the
first prompts are equal for all images and leave their features nearly as they were. `random` is that of torch's layers, as in
the authors' code.

Two lines say in any tower what the authors' code says in CLIP. Its prompts go through CLIP's first norm with the patches;
where there is none, or a stem behind it, what a network gives is soon ten times as long as a patch, so ours get the length of
the patches. And 1 - cos is half the square of how far the image moves, d: a move that changes logits by u has d = u / scale, so
the same alpha weighs (100 / scale)^2 as much as in CLIP, whose scale is 100.

Where we depart from the authors' code: it takes the patches before CLIP's first norm, and the values of the attention
without their norm; it flips the image that I0 is made of at random; it steps once a round, on the last batch; and once a
client's loss is below 0.5 it freezes phi and trains low-rank changes of its inputs instead, which we leave out. Its
attributes were written by a language model: give yours as `attributes`. Without them a class has some that fit anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Method, Prompts, Seen, World
from fedprompt.core.recipe import Recipe
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import PLAIN_WORDS, precise, similarity
from fedprompt.modules.context_generator import ask, initial_network
from fedprompt.modules.init import linear_layer
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

FORMER = "former."
CLIPS_SCALE = 100.0
ATTRIBUTES, CLASSES = "attributes", "classes"  # t (J, D), and T (C, D)
ANYTHING = (
    "which has a typical shape",
    "which has typical colors",
    "which has a typical texture",
    "which has its parts",
)
Attribute = Annotated[str, Field(pattern=r"^[^:]+: \S")]


@register("fedmvp")
@dataclass(frozen=True)
class FedMVP(Method):
    """Prompts of the image tower that a shared network makes of the image and of attributes of the classes."""

    attributes: tuple[Attribute, ...] = ()
    """What says more about a class, as `NAME: PHRASE`, such as "dog: which has a snout". Other classes have general ones."""
    words: Annotated[str, Field(min_length=1)] = PLAIN_WORDS
    """Words before the class name."""
    vision_tokens: Annotated[int, Field(ge=1)] = 4
    """n, prompts of an image."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Heads of the attention of the network."""
    consistency: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Alpha, weight of the distance of an image from itself without prompts, in a tower whose scale is 100, as CLIP's."""
    prompt_init: Literal["blank", "random"] = "blank"
    """First prompts: tokens of a blank image, or what a random network makes, as in the authors' code."""

    @property
    def recipe(self) -> Recipe:
        return Recipe(lr=0.001, schedule="cosine")

    @property
    def uses_text(self) -> bool:
        return True

    @property
    def weighs_evenly(self) -> bool:
        return True

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image",)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("block_inputs:1", "image")

    def check(self, world: World, train: TrainConfig) -> None:
        world.check_blocks()
        if world.width % self.heads:
            raise ConfigError(broken("method.heads", f"divide the image tower's width {world.width}", self.heads))
        patches = world.tokens - int(world.has_cls)
        if self.vision_tokens > patches:
            raise ConfigError(broken("method.vision_tokens", f"be at most the {patches} patches", self.vision_tokens))
        if self.attributes and not self.phrases.keys() & set(world.class_names):
            rule = f"begin with the names of classes ({', '.join(world.class_names[:3])}, ...)"
            raise ConfigError(broken("method.attributes", rule, self.attributes[0]))
        sentences, _ = self.sentences(world)
        room = world.text.with_names(tuple(sentences)).room
        if room is not None and room < 0:
            rule = f"leave every sentence at least {-room} tokens shorter, to fit into the text tower"
            raise ConfigError(broken("method.attributes", rule, max(sentences, key=len)))

    @property
    def phrases(self) -> dict[str, list[str]]:
        """The attributes that are given, by the names of their classes."""
        found: dict[str, list[str]] = {}
        for attribute in self.attributes:
            name, _, phrase = attribute.partition(": ")
            found.setdefault(name, []).append(phrase.strip())
        return found

    def sentences(self, world: World) -> tuple[list[str], Tensor]:
        """a (J,), and the share (J, C) that each has in the mean of its class."""
        spoken: list[str] = []
        owners: list[Tensor] = []
        given = self.phrases
        for number, name in enumerate(world.class_names):
            phrases = given.get(name, ANYTHING)
            spoken += [f"{self.words} {name}, {phrase}" for phrase in phrases]
            share = torch.zeros(world.classes)
            share[number] = 1 / len(phrases)
            owners += [share] * len(phrases)
        return spoken, torch.stack(owners)

    def init(self, world: World, generator: Stream) -> Roles:
        width = world.width
        former = initial_network(width, width, generator)
        former |= linear_layer("text", width, world.text.features, generator)
        if self.prompt_init == "blank":
            former |= {name: torch.zeros_like(former[name]) for name in former if name.startswith("feed_forward.out")}
            former["attention.output.weight"] = torch.zeros(width, width)
            blank = world.initial_prompt("blank", [0], 1, generator)[0, 0]
            former["attention.output.bias"] = width**0.5 * F.normalize(blank, dim=0)
        return Roles(shared=world.placed(prefixed(FORMER, former)))

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        sentences, shares = self.sentences(world)
        said = world.text.with_names(tuple(sentences)).encode_names()
        return {**received, **local, ATTRIBUTES: said, CLASSES: precise(shares.to(said)).T @ precise(said)}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        former = stripped(FORMER, params)
        patches = batch.features["block_inputs:1"][:, 0, int(world.has_cls) :].to(former["text.bias"].dtype)
        attributes = F.linear(params[ATTRIBUTES], former["text.weight"], former["text.bias"])
        made = ask(former, patches, attributes, None, self.heads)  # (B, M, d)
        means = runs(made.shape[1], self.vision_tokens).to(made) @ made
        tokens = F.normalize(means, dim=-1) * patches.norm(dim=-1).mean(-1)[:, None, None]
        return Prompts(tokens=(TokenPrompt(tokens.unsqueeze(1), (0,)),))

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, params[CLASSES])

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if not batch.training or not self.consistency:
            return plain
        same = (precise(seen.image) * precise(batch.features["image"])).sum(-1)  # of unit vectors
        return plain + self.consistency * (world.text.scale / CLIPS_SCALE) ** 2 * batch.mean(1 - same)


def runs(rows: int, parts: int) -> Tensor:
    """A matrix (parts, rows) of means over runs of consecutive rows, which share a row where they do not divide evenly."""
    found = torch.zeros(parts, rows)
    for part in range(parts):
        first, last = part * rows // parts, -(-(part + 1) * rows // parts)
        found[part, first:last] = 1 / (last - first)
    return found
