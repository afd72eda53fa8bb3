"""pFedPG (Yang et al., ICCV 2023, arXiv 2308.15367): the server generates a prompt for every client.

The server keeps base prompts P_base in R^{K x d}, one descriptor d_n in R^d per client and a multi-head cross-attention
W = (W_Q, W_K, W_V, W_O) without biases, in which the descriptor attends to the base prompts:

    a_n = Attention(q = d_n W_Q,  k = P_base W_K,  v = P_base W_V) W_O        P_n = P_base + a_n   (a_n added to every token)

Client n trains P_n and its head and sends back only the change D_n = P~_n - P_n. It stands for minus the gradient of
its loss in P_n, so descent on sum_n w_n L_n, w_n the client's share of the cohort, is a plain step *along* it:

    phi <- phi + alpha sum_n w_n (dP_n / dphi)^T D_n        phi = P_base, W, and d_n, which only client n changes

There is no momentum on the server: it would change descriptors of clients that did not take part. The server's tensors
are kept in single precision at least, since small steps vanish in half precision.

**The step of the server.** The paper's alpha = 1e-3 is for its long runs: in one round P_base moves by about a thousandth
of the mean change, so what clients learn of their prompts in a round is lost in the next. With alpha = 1 the base moves by
the mean change, as in federated averaging, but the generator moves much further: its output map W_O multiplies the base
prompts, and tokens of a blank image that are 11 long (ViT-B/16) would move their prompts by up to 1,300 times what clients
changed. So `server_lr: auto` takes the step with which generated prompts move, to first order, no further than clients
moved them, and alpha = 1 at most:

    alpha = min(1,  sum_n w_n |D_n|^2 / |G|^2)        G = sum_n w_n (dP_n / dphi)^T D_n, the direction of the step

since alpha |G|^2 is the change of sum_n w_n <P_n, D_n>, and that of P_n + D_n would be sum_n w_n |D_n|^2. Generated prompts
do not differ much at first: with ViT-B/16's base prompts of norm 1 and standard normal descriptors the a_n lie about 0.01
from their mean, with `descriptor_std: 10` about 0.1 (the initial descriptors are our choice). Base prompts start as tokens
of a blank image (`prompt_init`); W_O is then scaled by 0.1, so that a_n does not outweigh them.

With `depth` q > 1 there are base prompts for each of the first q blocks; the one descriptor attends to those of each
block with the same W.

A client that was held out gets copies of P_base and W and the mean descriptor of the clients that take part. It fits
the descriptor and its head; P_base and W do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Progress, Prompts, Server, Stage, Upload, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles, Statistic
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.modules.heads import NAMES
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, pick, prefixed, stripped

WEIGHTS = ("generator.query", "generator.key", "generator.value", "generator.output")
QUIET = 0.1  # first length of what the generator adds to blank tokens, as a share of theirs
SENT = "sent."  # copies of the server's tensors on their way to a client that was held out


@register("pfedpg")
@dataclass(frozen=True)
class PFedPG(FedVPT):
    """Prompts generated for each client by an attention on the server."""

    search_space: ClassVar[SearchSpace] = {"method.server_lr": FloatRange(1e-4, 1.0)}

    attention_heads: Annotated[int, Field(ge=1)] | None = None
    """Heads of the generator; null for the largest number up to 12 that fits."""
    server_lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """Alpha, learning rate of generator, base and descriptors (0.001 in the paper), or the one that fits the clients' changes."""
    descriptor_std: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Standard deviation of the initial descriptors."""
    predict_with: Literal["adapted", "generated"] = "adapted"
    """Predict with the prompt last trained here, or with the one just received."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.attention_heads is not None and world.width % self.attention_heads:
            raise ConfigError(broken("method.attention_heads", f"divide the width {world.width}", self.attention_heads))

    @property
    def sums_suffice(self) -> bool:
        return False  # every client has a descriptor

    def init(self, world: World, generator: Stream) -> Roles:
        width, depth = world.width, self.depth or world.blocks
        base = world.initial_prompt(self.prompt_init, range(depth), self.prompt_tokens, generator)
        server = {
            "base": base,
            "descriptors": generator.normal(world.clients, width) * self.descriptor_std,
            **{name: xavier(width, generator) for name in WEIGHTS},
        }
        if self.prompt_init == "blank":
            server["generator.output"] *= QUIET
        precise = torch.promote_types(world.dtype, torch.float32)
        own = {
            "own.prompt": torch.zeros_like(base, dtype=world.dtype, device=world.device),
            "own.trained": torch.zeros((), dtype=world.dtype, device=world.device),
        }
        roles = Roles(
            local=own,
            server={name: tensor.to(world.device, precise) for name, tensor in server.items()},
            stat={"prompt_change": Statistic(tuple(base.shape))},
        )
        return self.with_head(world, roles)

    def generate(self, tensors: Tensors, descriptor: Tensor) -> Tensor:
        """P_n (depth, K, d) from the base, the weights and one descriptor (d,)."""
        base = tensors["base"]
        query, key, value, output = (tensors[name] for name in WEIGHTS)
        parts = (self.attention_heads or most_heads(len(descriptor)), -1)
        asked = (descriptor @ query).unflatten(-1, parts)  # (h, e)
        keys, values = (base @ key).unflatten(-1, parts), (base @ value).unflatten(-1, parts)  # (depth, K, h, e)
        scores = torch.einsum("he,lkhe->lhk", asked, keys) / asked.shape[-1] ** 0.5
        answer = torch.einsum("lhk,lkhe->lhe", scores.softmax(-1), values).flatten(-2)  # (depth, d)
        return base + (answer @ output).unsqueeze(-2)

    def download(self, world: World, server: Server, client: int) -> Tensors:
        descriptors = server.own["descriptors"]
        if client not in world.newcomers:
            return {**server.shared, "prompt": self.generate(server.own, descriptors[client]).to(world.dtype)}
        start = descriptors[[each for each in range(world.clients) if each not in world.newcomers]].mean(0)
        sent = prefixed(SENT, {**pick(server.own, ("base", *WEIGHTS)), "descriptor": start})
        return {**server.shared, "prompt": self.generate(server.own, start).to(world.dtype), **sent}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("prompt", *NAMES), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        if "descriptor" in params:
            prompt = self.generate(stripped(SENT, params), params["descriptor"]).to(world.dtype)
            params = {**params, "prompt": prompt}
        return super().prompts(world, params, batch, noise)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        own = {"own.prompt": params["prompt"], "own.trained": torch.ones_like(local["own.trained"])}
        return {**upload, "prompt_change": params["prompt"] - received["prompt"]}, {**local, **own}

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        own = {name: tensor.detach().requires_grad_() for name, tensor in server.own.items()}
        pulls = [
            upload.weight
            * (self.generate(own, own["descriptors"][upload.client]) * upload.tensors["prompt_change"]).sum()
            for upload in uploads
        ]
        ascents = torch.autograd.grad(torch.stack(pulls).sum(), list(own.values()))
        rate = fitting_rate(uploads, ascents) if self.server_lr == "auto" else self.server_lr
        moved = {
            name: (tensor + rate * ascent).detach() for (name, tensor), ascent in zip(own.items(), ascents, strict=True)
        }
        return replace(super().aggregate(world, server, uploads, combine), own=moved)

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = {**received, **local}
        if client.index in world.newcomers:
            return {**params, "descriptor": received[SENT + "descriptor"]}
        if self.predict_with == "adapted":
            params["prompt"] = torch.where(local["own.trained"] > 0, local["own.prompt"], received["prompt"])
        return params

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return (Stage(self, ("descriptor", *NAMES), epochs, "newcomer"),)


def fitting_rate(uploads: Sequence[Upload], ascents: Sequence[Tensor]) -> Tensor:
    """Alpha with which generated prompts move, to first order, no further than clients moved them; 1 at most."""
    asked = sum(upload.weight * upload.tensors["prompt_change"].double().square().sum() for upload in uploads)
    found = torch.stack([ascent.double().square().sum() for ascent in ascents]).sum()
    return (asked / found.clamp_min(torch.finfo(torch.float64).tiny)).clamp(max=1.0).to(ascents[0])


def most_heads(width: int) -> int:
    """The largest number of heads up to 12 that divides the width."""
    return max(heads for heads in range(1, 13) if width % heads == 0)


def xavier(width: int, generator: Stream) -> Tensor:
    """A square matrix uniform in ±sqrt(3 / width)."""
    return (generator.uniform(width, width) * 2 - 1) * math.sqrt(3 / width)
