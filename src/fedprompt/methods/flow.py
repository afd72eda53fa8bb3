"""Flow (Panchal et al., 2023, arXiv 2211.15281) on prompts: a router mixes a local and a shared prompt per image.

Each client's training images are split into two halves. In a round it receives the prompt P_g, a router (W, b) and the
head, and

    first half    P_l starts as P_g and is trained as a prompt by itself, with the head; P_g and the router are fixed
    second half   P_g, the router and the head are trained on  p(x) = r(x) P_l + (1 - r(x)) P_g,   P_l fixed
    router        r(x) = sigmoid(W z(x) + b),   one probability per prompted block, or one for all

z(x) is the CLS row of the pass without prompts, normalised to mean 0 and variance 1 over its channels, so that the
router does not depend on the scale of the features. The router starts at zero: r = 1/2 everywhere.

P_g, the router and a shared head are averaged. P_l is discarded: before an evaluation a client trains it again from
what it received, on the same first half, and predicts with p(x). Hard routing predicts with P_l where r > 1/2 and with
P_g elsewhere; training is always soft. r = 0 is FedVPT with P_g, r = 1 the client's own prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Mixture, Prompts, Seen, Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.modules import heads
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

LOCAL_COPY = "local_copy.prompt"  # P_l, of one participation or one evaluation
ROUTER = ("router.weight", "router.bias")


@register("flow")
@dataclass(frozen=True)
class Flow(FedVPTDeep):
    """A shared prompt and a temporary local one, mixed per image by a shared router."""

    head: Literal["local", "shared", "shared_then_finetune"] = "shared"
    """Where the head is kept."""
    routing: Literal["soft", "hard"] = "soft"
    """Mix the two prompts in a prediction, or take the more probable one."""
    per_block: bool = True
    """One probability for every prompted block, instead of one for all."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cls",)

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        prompt = roles.shared["prompt"]
        outputs = len(prompt) if self.per_block else 1
        router = {"router.weight": prompt.new_zeros(outputs, world.width), "router.bias": prompt.new_zeros(outputs)}
        return replace(roles, shared={**roles.shared, **router})

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = super().begin(world, client, received, local)
        return {**params, LOCAL_COPY: params["prompt"]}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        mixed = Stage(self, ("prompt", *ROUTER, *heads.NAMES), train.epochs, "mixed", share=(0.5, 1.0))
        return (self._copying(train), mixed)

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (self._copying(train), *super().adaptation(world, train))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return (self._copying(train), *super().newcomer(world, train, epochs))

    def _copying(self, train: TrainConfig) -> Stage:
        step = LocalPath(**vars(self))
        return Stage(step, (LOCAL_COPY, *heads.NAMES), train.epochs, "local_copy", share=(0.0, 0.5))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        own = self.probability(params, batch)[..., None, None]  # (B, depth or 1, 1, 1)
        mixed = own * params[LOCAL_COPY] + (1 - own) * params["prompt"]
        return Prompts(tokens=(TokenPrompt(mixed, tuple(range(mixed.shape[1])), after=self.after),))

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        own = self.probability(params, batch)
        where = tuple(f"block {number}" for number in range(own.shape[-1])) if self.per_block else ("all blocks",)
        return (Mixture("the client's own prompt", where, own, "share beside the shared prompt"),)

    def probability(self, params: Tensors, batch: Batch) -> Tensor:
        """r(x), the weight of the client's own prompt."""
        cls = batch.features["cls"]
        score = F.linear(F.layer_norm(cls, cls.shape[-1:]), params["router.weight"], params["router.bias"])
        if self.routing == "hard" and not batch.training:
            return (score > 0).to(score.dtype)
        return score.sigmoid()


@dataclass(frozen=True)
class LocalPath(Flow):
    """The same model with only the client's own prompt."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return FedVPTDeep.prompts(self, world, {**params, "prompt": params[LOCAL_COPY]}, batch, noise)
