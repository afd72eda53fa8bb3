"""Fed-DPT (Wei et al., arXiv 2310.03103; in its last form ADAPT): a text context and a vision prompt for every domain, mixed by
the domain that the image tower sees.

Every client k of n is a domain. It has a text context P_k (m, d_t), which only itself trains, and all have n vision prompts
v_1..v_n (d_v) before block 0, which are averaged. With the image [x, v_1..v_n] behind the tower, of which q is the row of CLS,
r_k that of prompt k and I the image:

    w_k(x) = softmax_k( cos(q, r_k) / tau )            how much the image looks like domain k
    T_c(x) = sum_k w_k(x) g([P_k, c]),    logits = scale * <I, T_c(x) / ||T_c(x)||>
    loss   = CE(logits, y) + lambda * ( -log w_k )     for the images of client k

So the tower says which domain an image is from before its class is read, and a client predicts images of every domain. A client
held out of training has no domain; it predicts with all of them.

With one domain w = 1: `fedmaple` with coupling independent and one vision token before the first block. This is not FedAPT
(`fedapt`, Su et al.), another method by other authors: there keys of domains are random, fixed and scale one context, and
nothing enters the image tower.

No code was published, and of the paper only its summaries could be read here; the formulas are as its authors describe them in
words. Our choices: tau and lambda; w is read from the rows behind the last block, where the paper takes CLS' query and the
prompts' keys in it; contexts of other domains are replaced when they arrive, where the paper moves to them with a momentum.
Clients have the same weight in the average of the vision prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Mixture, Progress, Prompts, Seen, Server, Stage, Upload, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import WithText, precise
from fedprompt.methods.fedcocoop import similarity_by_image
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, pick

CONTEXTS = "context"  # P, all of them, at the server; by the name of its own that a client trains, which has their rate
SENT = "domain_contexts"  # and on the way to a client
CHANGE = "context_change"  # of a client's own, on the way up
OWN = "own_domain"  # (n,), 1 for the domain of this client
KNOWN = "known_text"  # (n, C, D), the classes in the contexts as they arrived


@register("feddpt")
@dataclass(frozen=True)
class FedDPT(WithText):
    """A context and a vision prompt for every domain, mixed image by image."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Tau, temperature of the weights of domains; small: one domain for an image."""
    domain_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Lambda, weight of the loss that teaches the vision prompts their domains."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("cls", "prompts", "image")

    @property
    def weighs_evenly(self) -> bool:
        return True

    @property
    def sums_suffice(self) -> bool:
        return False  # every client has a context at the server

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        world.check_blocks()
        if self.class_specific:
            raise ConfigError(broken("method.class_specific", "be false: there is a context per domain", True))

    def init(self, world: World, generator: Stream) -> Roles:
        domains = len(world.participants)
        context = self.new_context(world, generator)
        vision = world.initial_prompt("blank", [0], domains, generator)
        return Roles(
            shared=world.placed({"vision": vision}),
            server={CONTEXTS: context.repeat(domains, 1, 1)},
            stat={CHANGE: Statistic(tuple(context.shape))},
        )

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return {**server.shared, SENT: server.own[CONTEXTS]}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        contexts = received[SENT]
        own = contexts.new_tensor([float(each == client.index) for each in world.participants])
        with torch.no_grad():
            known = world.text.encode(contexts, self.class_position)
        mine = torch.einsum("n,nmd->md", own, contexts)
        return {**pick(received, ("vision",)), **local, "context": mine, OWN: own, KNOWN: known}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("context", "vision"), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        vision = (TokenPrompt(params["vision"], (0,)),)
        return Prompts(tokens=vision, text={"own": self.as_context(params["context"])} if batch.training else {})

    def log_weights(self, seen: Seen) -> Tensor:
        """log w (B, n)."""
        assert seen.prompts is not None
        row, prompts = F.normalize(precise(seen.cls), dim=-1), F.normalize(precise(seen.prompts), dim=-1)
        return (torch.einsum("bd,bnd->bn", row, prompts) / self.temperature).log_softmax(-1)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        text = precise(params[KNOWN])
        if "own" in seen.text:
            own = precise(params[OWN])[:, None, None]
            text = (1 - own) * text + own * precise(seen.text["own"])
        mixed = torch.einsum("bn,ncd->bcd", self.log_weights(seen).exp(), text)
        return similarity_by_image(world, seen.image, F.normalize(mixed, dim=-1))

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if not batch.training:
            return plain
        return plain - self.domain_weight * batch.mean(self.log_weights(seen) @ precise(params[OWN]))

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        change = params["context"] - torch.einsum("n,nmd->md", params[OWN], received[SENT])
        return {"vision": params["vision"], CHANGE: change}, {}

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        contexts = server.own[CONTEXTS].clone()
        places = {client: place for place, client in enumerate(world.participants)}
        for upload in uploads:
            contexts[places[upload.client]] += upload.tensors[CHANGE].to(contexts)
        return replace(super().aggregate(world, server, uploads, combine), own={CONTEXTS: contexts})

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        names = tuple(f"domain {world.client_names[client]}" for client in world.participants)
        return (Mixture("contexts of domains", names, self.log_weights(seen).exp()),)
