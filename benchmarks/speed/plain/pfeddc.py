"""pFedDC with `transformers`: global and local prompts for both towers, fused by cross-attention; both towers run in every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from federated import Params, Program, job, prompted_rows
from text_side import TextSide
from torch import Tensor

own = job()
side = TextSide(own)
HEADS = own.settings["method"]["heads"]


def fused(params: Params, modality: str) -> Tensor:
    """L + A(L, G) (..., m, d)."""
    local, everyones = params[f"local_{modality}"], params[f"global_{modality}"]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, params[f"fusion.{modality}.{name}.weight"], params[f"fusion.{modality}.{name}.bias"])

    asking, asked = F.layer_norm(local, local.shape[-1:]), F.layer_norm(everyones, everyones.shape[-1:])
    query, key, value = (
        linear(name, x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        for name, x in (("query", asking), ("key", asked), ("value", asked))
    )
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(-2, -3).flatten(-2)
    return local + linear("output", mixed)


def logits(params: Params, images: Tensor) -> Tensor:
    vision, text = fused(params, "vision"), fused(params, "text")
    rows = prompted_rows(own.model, images, lambda block, before: vision[block] if block < len(vision) else before)
    seen = side.image(torch.cat([rows[:, :1], rows[:, 1 + vision.shape[-2] :]], dim=1))
    return own.settings["scale"] * seen @ side.spoken(text).T


own.run(
    Program(
        loss=lambda params, images, labels: F.cross_entropy(logits(params, images), labels),
        predict=lambda params, images: logits(params, images).softmax(-1),
    )
)
