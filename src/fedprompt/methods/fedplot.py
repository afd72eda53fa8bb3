"""PLOT (Chen et al., ICLR 2023, arXiv 2210.01253), averaged: several contexts, matched to the patches of an image by
optimal transport.

For image b and class c, with unit vectors F_m of the M patches and T_n,c of the class in the N contexts:

    S[m, n]      = <F_m, T_n,c>
    G*           = argmin_G <G, 1 - S> - epsilon * entropy(G),   sum_n G[m, n] = 1 / M,   sum_m G[m, n] = 1 / N
    logits[b, c] = scale * sum_mn G*[m, n] S[m, n]

All N contexts are shared and averaged. The plan carries no gradient. With N = 1 the plan is 1 / M everywhere, so the logit
is the mean similarity of the patches. FedOTP is the same with one shared and one local context and a transport that may
leave patches out.

The authors stop the iteration when a batch changes by less than 0.01; ours has a fixed number of iterations, so that the
result for an image does not depend on the others of its batch. Contexts that begin with the same words would get the same
gradients and stay equal; here each begins beside the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.bases.with_text import WithText, precise
from fedprompt.modules.contexts import APART
from fedprompt.modules.optimal_transport import transport_plan
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("fedplot")
@dataclass(frozen=True)
class FedPLOT(WithText):
    """Several averaged contexts that divide the patches of an image between them."""

    search_space: ClassVar[SearchSpace] = {"method.epsilon": FloatRange(0.01, 1.0)}

    contexts: Annotated[int, Field(ge=1)] = 4
    """N, contexts of every class."""
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Weight of the plan's entropy; the smaller, the sharper."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """Iterations of Sinkhorn's algorithm, for every image and class."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image_patches",)

    def init(self, world: World, generator: Stream) -> Roles:
        drawn = torch.stack([self.new_context(world, generator) for _ in range(self.contexts)])  # (N, m, d)
        if self.first_words is not None and self.contexts > 1:
            drawn = drawn + APART * generator.normal(*drawn.shape).to(drawn)
        return Roles(shared={"context": drawn})

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return Prompts(text={str(n): self.as_context(params["context"][n]) for n in range(self.contexts)})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        text = torch.stack([seen.text[str(n)] for n in range(self.contexts)])  # (N, C, D)
        similarities = torch.einsum("bmd,ncd->bcmn", precise(seen.image_patches), precise(text))
        plan = transport_plan(similarities, self.epsilon, iterations=self.iterations, balanced=True)
        return world.text.scale * (plan * similarities).sum((-2, -1))
