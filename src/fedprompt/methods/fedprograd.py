"""ProGrad (Zhu et al., ICCV 2023, arXiv 2205.14865), averaged: PromptFL that never steps against what CLIP knew.

Two losses, T0_c = g("a photo of a" c) fixed, p0 and p the softmax of the logits with T0 and with the context:

    L_own     = CE(scale * I T^T, y)                                              gradient g of the context
    L_general = tau^2 * mean_b sum_c -p0_bc^(tau) log p_bc^(tau)                  gradient b

The context is stepped with g, less its part against b:

    g <- g - lambda * min(0, <g, b>) / ||b||^2 * b

A context that begins as the words of T0 is at the minimum of L_general: there b is rounding, and a b below 1e-4 of g
counts as zero. With lambda = 1 the rest is orthogonal to b; lambda = 0 is PromptFL. L_general has the gradient of the paper's KL(p0 | p),
of which it is the part that depends on p. It takes part only through b: it is no term of a loss. The value that a run
reports as loss contains it, though, since one loss is reported.

A step runs the text tower on two copies of the context, whose gradients are g and b; an evaluation runs it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Prompts, Seen, World
from fedprompt.core.registry import register
from fedprompt.methods.bases.with_anchor import ANCHOR, Anchored
from fedprompt.methods.bases.with_text import similarity
from fedprompt.modules.gradient_rules import aligned
from fedprompt.tensors import Tensors


@register("fedprograd")
@dataclass(frozen=True)
class FedProGrad(Anchored):
    """An averaged text context that is never stepped against zero-shot knowledge."""

    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Lambda, share of the opposing part that is removed; 0 is PromptFL."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Tau, temperature of the general loss."""

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        if not batch.training:
            return super().prompts(world, params, batch, noise)
        own, general = aligned(params["context"], self.strength)
        return Prompts(text={"context": self.as_context(own), "general": self.as_context(general)})

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if not batch.training:
            return plain
        before, now = (similarity(world, seen.image, text) for text in (params[ANCHOR], seen.text["general"]))
        return plain + batch.mean(general_loss(before, now, self.temperature))


def general_loss(before: Tensor, now: Tensor, temperature: float) -> Tensor:
    """Cross-entropy (B,) of softened predictions with those before; both are logits (B, C)."""
    target = (before / temperature).softmax(-1)
    return -(target * (now / temperature).log_softmax(-1)).sum(-1) * temperature**2
