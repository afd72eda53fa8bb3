"""PromptFL with FedAMP (Huang et al., AAAI 2021, arXiv 2007.03797): similar contexts attract each other.

The server keeps the last context P_j of every client that ever took part. With A(x) = 1 - exp(-x / sigma), client i
receives

    xi_ij = a_i A'(||P_i - P_j||^2) = (a_i / sigma) exp(-||P_i - P_j||^2 / sigma)                          j != i, in the pool
    u_i   = (1 - sum_j xi_ij) P_i + sum_j xi_ij P_j                                                        the cloud's context

and minimises, starting from its own last context,

    CE(scale * I T^T, y) + lam / (2 a_i) ||P - u_i||^2

It predicts with its own last context. u_i is a step of size a along the gradient of all pairs' A, and the objective a
proximal step of size a / lam, so both must use the same a.

The step is capped. All xi_ij are non-negative, but a step that is too long makes the self weight 1 - sum_j xi_ij
negative, and then u_i is no average any more: sigma = a = 1 does so as soon as two others are near. Hence a_i = min(a,
1 / sum_j A'(||P_i - P_j||^2)), which goes down with u_i. The self weight lies in [0, 1], and u_i is an average. Where
the cap binds, u_i is an average of only the others.

A client that never took part is not in the pool. It gets the mean of the last cohort (PromptFL's rule; in the first
round, the initial context) as u_i and with the full a, begins there and, until it has trained, predicts with it. The
paper lets all clients take part in every round and needs no such rule. A held-out client trains a context near that
mean for `federation.newcomer_epochs`.

A public port of this baseline has exp(+x / sigma), that is negative weights without bound, and a penalty without a
square or a gradient. With lam = 0 and all clients in every round this is CoOp, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Progress, Seen, Server, Stage, Upload, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.variants.wrapper import squared_distance
from fedprompt.modules.knn import Block
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, stripped

CLOUD = "cloud."  # the anchor of the local objective
STEP = "step"  # a_i
OWN, TRAINED = "own.context", "own.trained"  # the last context of this client, and 1 if there is one


@register("promptfl_amp")
@dataclass(frozen=True)
class PromptFLAMP(PromptFL):
    """Local text contexts that attract each other, more strongly if they are closer."""

    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Lambda, strength of the attraction."""
    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Squared distance at which the attraction has fallen to 1/e."""
    step: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """a, step of the server; capped where the self weight would be negative."""

    @property
    def starts_as_received(self) -> bool:
        return False

    @property
    def sums_suffice(self) -> bool:
        return False  # keeps a pool of contexts

    def init(self, world: World, generator: Stream) -> Roles:
        context = self.new_context(world, generator)
        return Roles(shared={"context": context}, local={OWN: context.clone(), TRAINED: context.new_zeros(())})

    def download(self, world: World, server: Server, client: int) -> Tensors:
        start, pool = server.shared["context"], server.pool
        if client not in pool:
            return {**server.shared, STEP: start.new_full((), self.step)}

        def answer(clients: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
            mine = {each: row.flatten() for each, row in zip(clients, pool.rows(clients), strict=True)}
            return clouds(mine, pool.blocks(), self.sigma, self.step)

        context, step = pool.together(client, ("clouds", self.sigma, self.step), answer)
        return {"context": context.view_as(start).to(start), STEP: step.to(start)}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        start = torch.where(local[TRAINED] > 0, local[OWN], received["context"])
        return {"context": start, CLOUD + "context": received["context"], STEP: received[STEP]}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("context",), train.epochs),)

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return (Stage(self, ("context",), epochs, "newcomer"),)

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        return plain + self.lam / (2 * params[STEP]) * squared_distance(params, stripped(CLOUD, params))

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        context = params["context"]
        return {"context": context}, {OWN: context, TRAINED: context.new_ones(())}

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        contexts = {upload.client: upload.tensors["context"] for upload in uploads}
        return replace(averaged, pool=server.pool.with_rows(contexts))


def clouds(
    mine: Mapping[int, Tensor], blocks: Iterable[Block], sigma: float, step: float
) -> dict[int, tuple[Tensor, Tensor]]:
    """u_i (n,) and a_i of some clients by their own flat contexts, from one pass over all contexts.

    With s_ij = A'(||P_i - P_j||^2) and a_i known only at the end, the pass sums s_ij and s_ij P_j. Sums and
    products are in double precision around the middle of the clients, so that a common offset costs no digits.
    """
    keys, own = np.fromiter(mine, dtype=np.int64), torch.stack(list(mine.values())).double()
    middle = own.mean(0)
    centred = own - middle
    total, pull = own.new_zeros(len(own)), torch.zeros_like(own)
    for block in blocks:
        rows = block.rows.double() - middle
        distances = centred.square().sum(1, keepdim=True) + rows.square().sum(1) - 2 * centred @ rows.T
        slopes = (-distances.clamp_min(0) / sigma).exp() / sigma
        slopes[np.nonzero(keys[:, None] == block.keys)] = 0
        total += slopes.sum(1)
        pull += slopes @ rows
    steps = total.reciprocal().clamp(max=step)
    weights = (steps * total).unsqueeze(1)
    anchors = (1 - weights).clamp_min(0) * centred + steps.unsqueeze(1) * pull + middle
    kept = anchors.to(mine[int(keys[0])])
    return {client: (kept[place], steps[place]) for place, client in enumerate(mine)}
