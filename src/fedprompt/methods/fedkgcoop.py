"""KgCoOp (Yao et al., CVPR 2023, arXiv 2303.13283), averaged: PromptFL whose class features stay near those of plain words.

    loss = CE(scale * I T^T, y) + lambda * mean_c (1 - <T_c, T0_c>),   T0_c = g("a photo of a" c), fixed

The paper writes the second term as a squared distance; of unit vectors that is twice 1 - <T_c, T0_c>, which is what the
authors' code has, and lambda = 8 belongs to it. lambda = 0 is PromptFL. A context that still is those words has the term
0. The authors take one template for every data set (such as "a photo of a {}, a type of pet"): `anchor_words`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.bases.with_anchor import ANCHOR, Anchored
from fedprompt.methods.bases.with_text import precise
from fedprompt.tensors import Tensors


@register("fedkgcoop")
@dataclass(frozen=True)
class FedKgCoOp(Anchored):
    """An averaged text context whose class features stay near those of plain words."""

    search_space: ClassVar[SearchSpace] = {"method.weight": FloatRange(0.1, 100.0)}

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 8.0
    """Lambda, weight of the distance; 0 is PromptFL."""

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        return plain + self.weight * distance(params[ANCHOR], seen.text["context"])


def distance(anchor: Tensor, text: Tensor) -> Tensor:
    """Mean over classes of 1 - cosine, of unit vectors (C, D)."""
    return (1 - (precise(anchor) * precise(text)).sum(-1)).mean()
