"""PromptFL with FedAMP (Huang et al., AAAI 2021, arXiv 2007.03797): clients whose contexts are alike pull each other together.

The server keeps the last context P_j of every client that ever took part. With A(x) = 1 - exp(-x / sigma), client i receives

    xi_ij = a_i A'(||P_i - P_j||^2) = (a_i / sigma) exp(-||P_i - P_j||^2 / sigma)                          j != i, in the pool
    u_i   = (1 - sum_j xi_ij) P_i + sum_j xi_ij P_j                                                        the cloud's context

and minimises, from its own last context on,

    CE(scale * I T^T, y) + lam / (2 a_i) ||P - u_i||^2

It predicts with its own last context. u_i is a step of size a along the gradient of all pairs' A, and the objective a proximal step of
size a / lam, so both must use the same a.

The step is capped. All xi_ij are non-negative, but a step that is too long makes the self weight 1 - sum_j xi_ij negative, and then
u_i is no average any more: sigma = a = 1 does so as soon as two others are near. Hence a_i = min(a, 1 / sum_j A'(||P_i - P_j||^2)),
which goes down with u_i. The self weight lies in [0, 1], and u_i is an average. Where the cap binds, u_i is an average of the others alone.

A client that never took part has no place in the pool. It gets the mean of the last cohort (PromptFL's rule; the start, in the first
round) as u_i and with the full a, begins there and, until it has trained, predicts with it. The paper lets all clients take part in every
round and needs no such rule. A held-out client trains a context near that mean for `federation.newcomer_epochs`.

A public port of this baseline has exp(+x / sigma), that is negative weights without bound, and a penalty without a square or a gradient.
With lam = 0 and all clients in every round this is CoOp, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.method import Batch, Client, Combine, Progress, Seen, Server, Stage, Upload, World
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.variants.base import squared_distance
from fedprompt.registry import register
from fedprompt.roles import Roles, Tensors, stripped

POOL = "pool."  #: the last context of each client, by its number; the server's own
CLOUD = "cloud."  #: what the local objective is anchored at
STEP = "step"  #: a_i
OWN, TRAINED = "own.context", "own.trained"  #: the last context of this client, and 1 if there is one


@register("promptfl_amp")
@dataclass(frozen=True)
class PromptFLAMP(PromptFL):
    """Text contexts of the clients' own that attract each other, the more the closer they are."""

    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  #: lambda, strength of the attraction
    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  #: squared distance at which it has fallen to 1/e
    step: Annotated[float, Field(gt=0, allow_inf_nan=False)] = (
        1.0  #: a, of the server; capped where the self weight would be negative
    )

    @property
    def starts_as_received(self) -> bool:
        return False

    @property
    def sums_suffice(self) -> bool:
        return False  # keeps a pool of contexts

    def init(self, world: World, generator: torch.Generator) -> Roles:
        context = self.new_context(world, generator)
        return Roles(shared={"context": context}, local={OWN: context.clone(), TRAINED: context.new_zeros(())})

    def download(self, world: World, server: Server, client: int) -> Tensors:
        others = {int(name): context for name, context in stripped(POOL, server.own).items()}
        mine = others.pop(client, None)
        if mine is None:
            return {**server.shared, STEP: server.shared["context"].new_full((), self.step)}
        context, step = cloud(mine, [others[other] for other in sorted(others)], self.sigma, self.step)
        return {"context": context, STEP: step}

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
        pool = {f"{POOL}{upload.client}": upload.tensors["context"] for upload in uploads}
        return replace(super().aggregate(world, server, uploads, combine), own={**server.own, **pool})


def attention(mine: Tensor, others: Tensor, sigma: float, step: float) -> tuple[Tensor, Tensor]:
    """The weights xi (J,) of other contexts (J, ...) and the step behind them, at most as long as leaves the self weight in [0, 1]."""
    distances = (others - mine).square().flatten(1).sum(1)
    slopes = (-distances / sigma).exp() / sigma
    capped = slopes.sum().reciprocal().clamp(max=step)
    return capped * slopes, capped


def cloud(mine: Tensor, others: Sequence[Tensor], sigma: float, step: float) -> tuple[Tensor, Tensor]:
    """u_i and a_i of a client with this context; nobody else there, the context itself."""
    if not others:
        return mine, mine.new_full((), step)
    stacked = torch.stack(list(others))
    weights, capped = attention(mine, stacked, sigma, step)
    own = (1 - weights.sum()).clamp_min(0)
    return own * mine + torch.einsum("j,j...->...", weights, stacked), capped
