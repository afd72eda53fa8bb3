"""FedMGP (Bo et al., NeurIPS 2025): several pairs of a text and a vision prompt; a client sends the pairs that are like the
global ones.

Client k has G groups of a text context P_g (m, d_t) and a vision prompt V_g (n, d_v) before the first block. Every group
is a model of its own, and a client predicts with the mean of their logits:

    z_g  = scale * f([x, V_g]) g([P_g, c])^T,     logits = mean_g z_g
    loss = mean_g CE(z_g, y) - mu / 2 * (apart(T_1..T_G) + apart(I_1..I_G))

    apart(F_1..F_G) = mean over samples and over pairs g < h of mean_d |F_g - F_h|        of classes, and of images

After training a client draws s groups of each kind without replacement, with probabilities

    p_g = softmax_g( max_j cos(P_g, P_j^global) / tau )                   and the same for V_g

and sends them in the order drawn; the server averages the j-th of all clients into the j-th of its s global prompts,
every client with the same weight. When a client gets them, they replace the groups it drew last. In its first round they
replace the first s, of which the global ones are copies: nothing changes, and all groups are alike for all clients.

With G = s = 1 and mu = 0 this is FedVLP, the independent coupling of `fedmaple` with one prompted block.

Where we depart from the authors' code: it takes the *absolute value* of its diversity term, which then pulls the groups
together; ours keeps the sign. Its first draw has equal probabilities and a seed that does not depend on the run's. A step
costs G passes of both towers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Progress, Prompts, Seen, Stage, World, cross_entropy
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import WithText, precise
from fedprompt.modules.contexts import APART
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

KINDS = ("context", "vision")
GROUPS = "groups."  # a client's own, all of them
DRAWN = "drawn."  # which of them it sent last


@register("fedmgp")
@dataclass(frozen=True)
class FedMGP(WithText):
    """Groups of text and vision prompts, of which a client sends those that are like the global ones."""

    groups: Annotated[int, Field(ge=1)] = 5
    """G, pairs of a text and a vision prompt at every client."""
    sent: Annotated[int, Field(ge=1)] = 2
    """s, groups that a client sends, and global prompts."""
    vision_tokens: Annotated[int, Field(ge=1)] = 2
    """n, tokens of a vision prompt."""
    diversity: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Mu, weight of the distance between groups."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Tau, temperature of the draw; small: the most similar groups."""

    @property
    def weighs_evenly(self) -> bool:
        return True

    @property
    def starts_as_received(self) -> bool:
        return False

    @property
    def mixes_passes(self) -> bool:
        return True

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        world.check_blocks()
        if self.sent > self.groups:
            raise ConfigError(broken("method.sent", f"be at most the {self.groups} groups of a client", self.sent))

    def init(self, world: World, generator: Stream) -> Roles:
        context = torch.stack([self.new_context(world, generator) for _ in range(self.groups)])
        if self.first_words is not None and self.groups > 1:
            context = context + APART * generator.normal(*context.shape).to(context)
        vision = world.initial_prompt("blank", [0] * self.groups, self.vision_tokens, generator)
        every = world.placed({"context": context, "vision": vision})
        first = torch.arange(self.sent)
        return Roles(
            shared={name: every[name][: self.sent].clone() for name in KINDS},
            local={GROUPS + name: every[name] for name in KINDS} | {DRAWN + name: first.clone() for name in KINDS},
        )

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        own = {GROUPS + name: local[GROUPS + name].index_copy(0, local[DRAWN + name], received[name]) for name in KINDS}
        return {**local, **own, **{name: received[name] for name in KINDS}}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, tuple(GROUPS + name for name in KINDS), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        text = {str(g): self.as_context(params[GROUPS + "context"][g]) for g in range(self.groups)}
        tokens = params[GROUPS + "vision"].unsqueeze(1)  # (G, 1, n, d): a set for each of the G repeats of the batch
        return Prompts(text=text, tokens=(TokenPrompt(tokens, (0,)),), repeat=self.groups)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return self.by_group(world, seen).mean(0)

    def by_group(self, world: World, seen: Seen) -> Tensor:
        """z (G, B, C)."""
        image, text = self.features(seen)
        return world.text.scale * torch.einsum("gbd,gcd->gbc", image, text) + world.text.bias

    def features(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Images (G, B, D) and classes (G, C, D) of every group."""
        image = precise(seen.image).unflatten(0, (self.groups, -1))
        return image, precise(torch.stack([seen.text[str(g)] for g in range(self.groups)]))

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        each = self.by_group(world, seen)
        labels = batch.labels.expand(self.groups, -1)
        plain = batch.mean(cross_entropy(each, labels).mean(0))
        if self.groups == 1 or not self.diversity:
            return plain
        image, text = self.features(seen)
        return plain - self.diversity / 2 * (apart(text).mean() + batch.mean(apart(image)))

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload: Tensors = {}
        kept: Tensors = {}
        for name in KINDS:
            own = params[GROUPS + name]
            likeness = similarity_to_global(own, received[name])
            picked = draw(likeness / self.temperature, self.sent, client.stream(f"groups of {name}"))
            upload[name] = own[picked]
            kept |= {GROUPS + name: own, DRAWN + name: picked}
        return upload, kept

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return (Stage(self, tuple(GROUPS + name for name in KINDS), epochs, "newcomer"),)


def apart(features: Tensor) -> Tensor:
    """Mean distance (S,) over the pairs of groups, of the features (G, S, D) of S samples."""
    first, second = torch.triu_indices(len(features), len(features), 1)
    return (features[first] - features[second]).abs().mean(-1).mean(0)


def similarity_to_global(own: Tensor, common: Tensor) -> Tensor:
    """The largest cosine (G,) of each group (G, ...) with a global prompt (s, ...)."""
    mine, theirs = (F.normalize(precise(tensor).flatten(1), dim=-1) for tensor in (own, common))
    return (mine @ theirs.T).amax(-1)


def draw(scores: Tensor, count: int, generator: Stream) -> Tensor:
    """Indices (count,) drawn without replacement with the probabilities softmax(scores), in the order drawn.

    The largest of scores + Gumbel noise have that distribution.
    """
    uniform = generator.uniform(len(scores)).double().clamp_min(torch.finfo(torch.float64).tiny)
    return (scores.double().cpu() - (-uniform.log()).log()).topk(count).indices.to(scores.device)
