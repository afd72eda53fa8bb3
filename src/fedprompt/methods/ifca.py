"""IFCA (Ghosh et al., 2020, arXiv 2006.04088) on prompts: several models, and every client joins the best one for it.

The server holds K sets of prompts P_1..P_K (with a head each, unless heads are local), started from different random
draws. In each round a client receives all of them and

    joins     k* = argmin_k f(P_k),   f the mean loss over its training images
    trains    set k* as FedVPT would
    sends     the trained set and the one-hot k*
    server    P_k <- mean over the clients that joined k, by their relative shares; a set that no client joined does not change

An evaluation chooses in the same way, so clients that never trained have a set too. A client does not store its choice.

Heads start at zero, so at first every set predicts all classes equally and all losses are ln C. Ties are broken by a
random draw of the client, so the first choice is random and spreads the clients over the sets. With K = 1 this is
FedVPT of the same depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Mixture, Progress, Seen, Server, Stage, Upload, World, shares
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.modules import heads
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, pick, prefixed, stripped

CLUSTERS = "clusters."  # all sets (K, ...), the server's own
SENT = "sent."  # a copy of them on its way down
UPDATE = "update."  # the one set a client trained, on its way up
CHOICE = "cluster"  # which set that was, one-hot (K,)


@register("ifca")
@dataclass(frozen=True)
class IFCA(FedVPTDeep):
    """Sets of prompts, of which each client trains and uses the one with the lowest training loss."""

    head: Literal["local", "shared", "shared_then_finetune"] = "shared"
    """Where the head is kept; shared means inside a cluster."""
    clusters: Annotated[int, Field(ge=1)] = 3
    """K, sets of prompts."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.clusters > 1 and self.prompt_init == "zero":
            raise ConfigError(
                broken(
                    "method.prompt_init", "not be zero with several clusters, which would be equal", self.prompt_init
                )
            )

    @property
    def sums_suffice(self) -> bool:
        return False  # every client joins a cluster

    def init(self, world: World, generator: Stream) -> Roles:
        sets = [super(IFCA, self).init(world, generator) for _ in range(self.clusters)]
        stacked = {name: torch.stack([each.shared[name] for each in sets]) for name in sets[0].shared}
        updates = {UPDATE + name: Statistic(tuple(tensor.shape)) for name, tensor in sets[0].shared.items()}
        return Roles(
            local=sets[0].local,
            server=prefixed(CLUSTERS, stacked),
            stat={**updates, CHOICE: Statistic((self.clusters,), choice=True)},
        )

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return prefixed(SENT, stripped(CLUSTERS, server.own))

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        sets = stripped(SENT, received)
        candidates = [{**{name: stacked[k] for name, stacked in sets.items()}, **local} for k in range(self.clusters)]
        chosen = self._best(client, candidates) if self.clusters > 1 else 0
        one_hot = F.one_hot(torch.tensor(chosen), self.clusters).to(world.device, world.dtype)
        return {**candidates[chosen], CHOICE: one_hot}

    def _best(self, client: Client, candidates: Sequence[Tensors]) -> int:
        """The set with the lowest training loss; of several, one at random."""
        losses = [client.loss(params) for params in candidates]
        best = [k for k, loss in enumerate(losses) if loss == min(losses)]
        return best[client.stream(CHOICE).integer(len(best))]

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        trained = stripped(UPDATE, received)  # present only when a client is evaluated right after its own training
        return {**trained, **local} if trained else self.begin(world, client, received, local)

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        """The cluster the client joined, for all of its images."""
        if CHOICE not in params:
            return ()
        names = tuple(f"cluster {number}" for number in range(self.clusters))
        return (Mixture("clusters", names, params[CHOICE].expand(len(batch.labels), -1)),)

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, (*stripped(CLUSTERS, world.roles.server), *world.roles.local), train.epochs),)

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return (Stage(self, heads.NAMES, epochs, "newcomer"),)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        trained = pick(params, stripped(CLUSTERS, world.roles.server))
        return {**prefixed(UPDATE, trained), CHOICE: params[CHOICE]}, pick(params, world.roles.local)

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        sets = stripped(CLUSTERS, server.own)
        renewed = {name: list(stacked) for name, stacked in sets.items()}
        for k in range(self.clusters):
            members = [upload for upload in uploads if upload.tensors[CHOICE][k] and upload.weight > 0]
            if not members:
                continue
            weights = shares([upload.weight for upload in members])
            before = {name: stacked[k] for name, stacked in sets.items()}
            mean = combine([stripped(UPDATE, upload.tensors) for upload in members], weights, before)
            for name, tensor in mean.items():
                renewed[name][k] = tensor
        own = {name: torch.stack(tensors) for name, tensors in renewed.items()}
        return replace(server, own={**server.own, **prefixed(CLUSTERS, own)})
