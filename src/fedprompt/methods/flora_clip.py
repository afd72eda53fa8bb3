"""FLORA on CLIP ("Better Balance Between Generalization and Personalization in Multi-Modal Federated Prompt Learning"): a
global context, an orthogonal low-rank change of it at every client, and an attention adapter on the image feature.

    P    = G + B A               G (m, d) averaged,  B (m, r) and A (r, d) local
    f'   = softmax(W_2 relu(W_1 f + b_1) + b_2) * f,   I = f' / ||f'||        f the image before it is normalised
    loss = CE(scale * I T_P^T, y) + mu * contrast + w_o ||B^T B - 1||^2 + w_a ||A||^2
    contrast = mean_c -log( e^{<t0_c, tG_c> / tau} / (e^{<t0_c, tG_c> / tau} + e^{<t0_c, tP_c> / tau}) )

t0, tG and tP are class features with plain words, with G and with P. So the global context is pulled towards the plain
words, and the client's is pushed away from them.

Here B begins with orthonormal columns, A and W_2 at zero: the first model is PromptFL's. With A = 0 kept and no adapter
this is PromptFL with the contrast of its own features. A client that never took part predicts with G.

Not to be confused with FLoRA, low-rank matrices that are stacked: `flora_stacked`, which `flora` still means.

The released code cannot train (its model returns six values where its step takes five), so these are read from it, not
run. Of it we leave out a second local context, which is trained by nothing but its own penalty. It compares B B^T with
the m x m identity, which a B of rank r < m cannot reach; since ||B B^T - 1||^2 = ||B^T B - 1||^2 + m - r both have the
same minimum. Its penalties are the lengths, ours their squares: at the minimum, where B begins, a length has no gradient
but the direction of rounding errors. It starts B and A near 0.02. The adapter is meant to be averaged there, but the list
it is averaged from is empty: `adapter` says shared, local or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Seen, World
from fedprompt.core.recipe import Recipe
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_low_rank import LEFT, RIGHT, WithLowRank
from fedprompt.methods.bases.with_text import RATES, precise, similarity
from fedprompt.modules.init import linear_layer
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

ADAPTER = "adapter."


@register("flora_clip")
@dataclass(frozen=True)
class FLORAClip(WithLowRank):
    """A global context with orthogonal low-rank changes, and an adapter on the image feature."""

    search_space: ClassVar[SearchSpace] = {"method.contrast_weight": FloatRange(0.01, 10.0)}

    rank: Annotated[int, Field(ge=1)] = 2
    """r, rank of a client's change; at most the words of the context."""
    adapter: Literal["shared", "local", "none"] = "shared"
    """Where the adapter on the image feature is kept, or none."""
    contrast_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Mu, weight of the contrast; 0 for none."""
    orthogonal_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Weight of the squared distance of B^T B from the identity."""
    size_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Weight of the squared length of A."""

    @property
    def recipe(self) -> Recipe:
        return Recipe(lr=0.001, lrs={**RATES, "adapter.*": 1e-4}, schedule="cosine")

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image",) if self.adapter == "none" else ("image_raw",)

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.rank > self.context_length(world):
            rule = f"be at most the {self.context_length(world)} words of the context"
            raise ConfigError(broken("method.rank", rule, self.rank))

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        if self.adapter == "none":
            return roles
        adapter = world.placed(prefixed(ADAPTER, new_adapter(world.text.features, generator)))
        if self.adapter == "shared":
            return Roles(shared={**roles.shared, **adapter}, local=roles.local)
        return Roles(shared=roles.shared, local={**roles.local, **adapter})

    def own(self, world: World, context: Tensor, generator: Stream) -> Tensors:
        *several, tokens, width = context.shape
        left = torch.linalg.qr(generator.normal(*several, tokens, self.rank)).Q
        return world.placed({LEFT: left, RIGHT: torch.zeros(*several, self.rank, width)})

    def untrained(self, received: Tensors, local: Tensors) -> Tensors:
        return {RIGHT: torch.zeros_like(local[RIGHT])}

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        if self.adapter == "none":
            return super().logits(world, params, seen, batch, noise)
        return similarity(world, adapted(stripped(ADAPTER, params), seen.image_raw), seen.text["own"])

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if not batch.training:
            return plain
        return plain + self.orthogonal_weight * off_orthogonal(params[LEFT]) + self.size_weight * square(params[RIGHT])

    def rivals(self, anchor: Tensor, shared: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return (anchor * shared).sum(-1), (anchor * own).sum(-1)


def new_adapter(width: int, generator: Stream) -> Tensors:
    """Maps (D, D) whose output is even over all numbers, so that the image keeps its direction."""
    start = {**linear_layer("in", width, width, generator)}
    return {**start, "out.weight": torch.zeros(width, width), "out.bias": torch.zeros(width)}


def adapted(adapter: Tensors, feature: Tensor) -> Tensor:
    """Unit vectors I (B, D) of features f (B, D)."""
    weights, given = {name: precise(tensor) for name, tensor in adapter.items()}, precise(feature)
    hidden = F.relu(F.linear(given, weights["in.weight"], weights["in.bias"]))
    return F.normalize(F.linear(hidden, weights["out.weight"], weights["out.bias"]).softmax(-1) * given, dim=-1)


def off_orthogonal(left: Tensor) -> Tensor:
    """||B^T B - 1||^2, summed over classes where each has its own."""
    gram = precise(left).mT @ precise(left)
    return square(gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def square(tensor: Tensor) -> Tensor:
    """The squared length."""
    return precise(tensor).square().sum()
