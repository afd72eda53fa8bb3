"""FedOTP (Li et al., CVPR 2024): optimal transport matches the patches of an image to a global and a local context.

For image b and class c, with unit vectors F_m of the M patches and T_n,c of the class in the N = 2 contexts:

    S[m, n] = <F_m, T_n,c>,   T* = plan of the costs 1 - S (`modules/optimal_transport.py`), logits[b, c] = scale * sum_mn T*[m, n] S[m, n]

Each context takes the mass gamma / 2 exactly, each patch gives 1 / M at most: with gamma < 1 patches that fit neither
are left out, and logits are at most gamma * scale. The plan carries no gradient. The global context is averaged, the
local one stays.

The authors' code iterates with the kernel itself, in half precision, and gives NaN where that underflows; it stops when
a batch has converged on average, and trains all clients in the first round. Ours uses logarithms and a fixed number of
iterations, and trains only the cohort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.bases.with_local import WithLocalContext
from fedprompt.methods.bases.with_text import precise
from fedprompt.modules.contexts import APART
from fedprompt.modules.optimal_transport import transport_plan
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("fedotp")
@dataclass(frozen=True)
class FedOTP(WithLocalContext):
    """A global and a local context that divide the patches of an image between them."""

    search_space: ClassVar[SearchSpace] = {"method.epsilon": FloatRange(0.01, 1.0)}

    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Weight of the plan's entropy; the smaller, the sharper."""
    mass: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Gamma, share of the patches that is transported."""
    balanced: bool = False
    """Transport all of every patch; `mass` is then ignored."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """Iterations of Sinkhorn's algorithm, for every image and class."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image_patches",)

    def own(self, world: World, context: Tensor, generator: Stream) -> Tensors:
        """The transport treats both contexts alike: from the same words they would get the same gradients and stay equal,
        and the local one would be sent as the shared one. So the local one starts beside the words.
        """
        local = super().own(world, context, generator)["local_context"]
        beside = APART * generator.normal(*local.shape).to(local) if self.first_words is not None else 0.0
        return {"local_context": local + beside}

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        contexts = torch.stack([seen.text["context"], seen.text["local_context"]])  # (N, C, D)
        return self.transported(world.text.scale, seen.image_patches, contexts)

    def transported(self, scale: float, patches: Tensor, contexts: Tensor) -> Tensor:
        """Logits (B, C) of patches (B, M, D) and classes (N, C, D), in at least float32."""
        similarities = torch.einsum("bmd,ncd->bcmn", precise(patches), precise(contexts))
        plan = transport_plan(similarities, self.epsilon, self.mass, self.iterations, self.balanced)
        return scale * (plan * similarities).sum((-2, -1))
