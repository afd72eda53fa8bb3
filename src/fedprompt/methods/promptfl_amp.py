"""PromptFL with FedAMP (Huang et al., AAAI 2021, arXiv 2007.03797): similar contexts attract each other.

The server keeps the last context P_j of every client that ever took part, n of them. With the attraction A between two
contexts, client i receives

    xi_ij = a_i A'(||P_i - P_j||^2)                                                                        j != i, in the pool
    u_i   = (1 - sum_j xi_ij) P_i + sum_j xi_ij P_j                                                        the cloud's context

and minimises, starting from its own last context,

    CE(scale * I T^T, y) + lam / (2 a_i) ||P - u_i||^2

It predicts with its own last context. u_i is a step of size a along the gradient of all pairs' A, and the objective a
proximal step of size a / lam, so both must use the same a.

The scale of A. The paper has A(x) = 1 - exp(-x / sigma), A'(x) = exp(-x / sigma) / sigma, with a sigma tuned for whole
networks. Contexts differ by squared distances far below 1: with sigma = 1 all weights are equal, the self weight is 0, and
everybody gets the mean of the others. So by default (`sigma: null`) the scale follows the distances, and A is a mean over
the other clients:

    A(x)  = sigma (1 - exp(-x / sigma)) / (n - 1),   sigma = median of ||P_j - P_k||^2 over all pairs in the pool
    xi_ij = a_i exp(-||P_i - P_j||^2 / sigma) / (n - 1)

It has the paper's form and conditions (increasing, concave, A(0) = 0), whatever the unit of the contexts: half of the pairs
attract each other with more than 1/e of the full strength. With a = 1 the self weight is one minus the mean of the others'
strengths, never negative, and the pull has curvature lam. In a pool of more than 256 clients the median is that of 256 of
them. The diagnostics `amp.weight_self` and `amp.weight_entropy` (entropy of the others' weights as a share of the greatest
possible; 1: all equal, so attention does nothing) show whether the attention acts.

The step is capped. All xi_ij are non-negative, but a step that is too long makes the self weight 1 - sum_j xi_ij
negative, and then u_i is no average any more: a given sigma = a = 1 does so as soon as two others are near. Hence a_i = min(a,
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

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Progress, Seen, Server, Stage, Upload, World
from fedprompt.core.pool import Pool
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_text import RATES
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.variants.wrapper import squared_distance
from fedprompt.modules.knn import Block
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, stripped

CLOUD = "cloud."  # the anchor of the local objective
STEP = "step"  # a_i
SELF, ENTROPY = "self_weight", "weight_entropy"  # of the cloud, for the diagnostics
OWN, TRAINED = "own.context", "own.trained"  # the last context of this client, and 1 if there is one
MOST_COMPARED = 256  # clients of a pool whose distances make the median


@register("promptfl_amp")
@dataclass(frozen=True)
class PromptFLAMP(PromptFL):
    """Local text contexts that attract each other, more strongly if they are closer."""

    rates: ClassVar[Mapping[str, float | str]] = RATES

    lam: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Lambda, strength of the attraction."""
    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Squared distance at which the attraction has fallen to 1/e; null for the median over all pairs of clients."""
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
            alone = {STEP: start.new_full((), self.step), SELF: start.new_zeros(()), ENTROPY: start.new_ones(())}
            return {**server.shared, **alone}

        def answer(clients: Sequence[int]) -> dict[int, Cloud]:
            mine = {each: row.flatten() for each, row in zip(clients, pool.rows(clients), strict=True)}
            if self.sigma is not None:
                return clouds(mine, pool.blocks(), self.sigma, 1 / self.sigma, self.step)
            return clouds(mine, pool.blocks(), median_distance(pool), 1 / max(len(pool.clients) - 1, 1), self.step)

        cloud = pool.together(client, ("clouds", self.sigma, self.step), answer)
        numbers = {STEP: cloud.step, SELF: cloud.self_weight, ENTROPY: cloud.entropy}
        return {"context": cloud.context.view_as(start).to(start), **{n: v.to(start) for n, v in numbers.items()}}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        start = torch.where(local[TRAINED] > 0, local[OWN], received["context"])
        numbers = {name: received[name] for name in (STEP, SELF, ENTROPY)}
        return {"context": start, CLOUD + "context": received["context"], **numbers}

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

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        """The self weight and the evenness of the others' weights, and how far the context is from the cloud's."""
        change = params["context"] - params[CLOUD + "context"]
        found = {"amp.distance": change.norm() / params["context"].norm().clamp_min(torch.finfo(change.dtype).tiny)}
        return {**found, "amp.weight_self": params[SELF], "amp.weight_entropy": params[ENTROPY]}

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        contexts = {upload.client: upload.tensors["context"] for upload in uploads}
        return replace(averaged, pool=server.pool.with_rows(contexts))


@dataclass(frozen=True)
class Cloud:
    """What the server makes of the pool for one client."""

    context: Tensor
    """u_i, flat."""
    step: Tensor
    """a_i."""
    self_weight: Tensor
    entropy: Tensor
    """Of the weights of the others, as a share of the greatest possible; 1 if there are fewer than two."""


def median_distance(pool: Pool) -> float:
    """Median squared distance of two contexts of a pool, or of up to 256 of them at even distances in it; above zero."""
    some = pool.clients[np.unique(np.linspace(0, len(pool.clients) - 1, MOST_COMPARED).astype(int))]
    rows = pool.rows(some.tolist()).flatten(1).double()
    distances = torch.nn.functional.pdist(rows).square()
    return max(float(distances.median()), float(np.finfo(np.float32).tiny)) if len(distances) else 1.0


def clouds(
    mine: Mapping[int, Tensor], blocks: Iterable[Block], sigma: float, strength: float, step: float
) -> dict[int, Cloud]:
    """Clouds of some clients by their own flat contexts, from one pass over all contexts.

    With s_ij = A'(||P_i - P_j||^2) = strength exp(-||P_i - P_j||^2 / sigma) and a_i known only at the end, the pass sums
    s_ij, s_ij log s_ij and s_ij P_j. Sums and products are in double precision around the middle of the clients, so that a
    common offset costs no digits.
    """
    keys, own = np.fromiter(mine, dtype=np.int64), torch.stack(list(mine.values())).double()
    middle = own.mean(0)
    centred = own - middle
    total, entropy, pull = own.new_zeros(len(own)), own.new_zeros(len(own)), torch.zeros_like(own)
    others = -1
    for block in blocks:
        rows = block.rows.double() - middle
        distances = centred.square().sum(1, keepdim=True) + rows.square().sum(1) - 2 * centred @ rows.T
        slopes = strength * (-distances.clamp_min(0) / sigma).exp()
        slopes[np.nonzero(keys[:, None] == block.keys)] = 0
        total += slopes.sum(1)
        entropy += torch.special.entr(slopes).sum(1)
        pull += slopes @ rows
        others += len(rows)
    steps = total.reciprocal().clamp(max=step)
    self_weights = (1 - steps * total).clamp_min(0)
    anchors = self_weights.unsqueeze(1) * centred + steps.unsqueeze(1) * pull + middle
    kept = anchors.to(mine[int(keys[0])])
    evenness = (
        torch.where(total > 0, entropy / total + total.log(), 0.0) / math.log(others) if others > 1 else total * 0 + 1
    )
    return {
        client: Cloud(kept[place], steps[place], self_weights[place], evenness[place])
        for place, client in enumerate(mine)
    }
