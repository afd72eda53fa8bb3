"""pFedPrompt (Guo et al., WWW 2023): one text context for all clients, and at each client a memory of its own images.

    text      P <- sum_k p_k P_k, trained and averaged as in PromptFL; logits scale * f T^T, f the image and T_c the class, unit vectors
    memory    keys F_cs: image features of up to `memory_per_class` training images s of class c of this client; no parameters
    predict   logits_c = scale * f T_c + alpha * sum_s exp(-beta (1 - f F_cs))

The memory is local: it is computed from the client's training images when needed, is part of no message, and needs no
training, so clients that never took part, and held-out ones, have one too. Of a class with too many images it keeps
some at even distances in the client's order, so that each domain is represented in proportion.

There is no public code, and the paper's details are not known to us: the form of the memory is Tip-Adapter's (Zhang et
al., ECCV 2022), as are alpha and beta. Our choice: the memory is used only for tests. In training every image would
find itself in it, with weight 1 and its right label, which hides the errors of the context; `train_with_memory` does it
anyway. Without it the context is that of PromptFL to the bit, and with alpha = 0 the predictions too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Client, Mixture, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.bases.with_text import precise
from fedprompt.methods.promptfl import PromptFL
from fedprompt.tensors import Tensors

KEYS, KNOWN = "memory.keys", "memory.known"  # (C, S, D), and (C, S) with 1 where there is a key


@register("pfedprompt")
@dataclass(frozen=True)
class PFedPrompt(PromptFL):
    """An averaged text context and a memory of the client's own images."""

    search_space: ClassVar[SearchSpace] = {
        "method.memory_weight": FloatRange(0.1, 100.0),
        "method.sharpness": FloatRange(0.5, 50.0),
    }

    memory_per_class: Annotated[int, Field(ge=1)] = 16
    """S, largest number of remembered images per class."""
    memory_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Alpha, weight of the memory."""
    sharpness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.5
    """Beta, how fast weights fall with the distance."""
    train_with_memory: bool = False
    """Use the memory in training too, where each image finds itself in it."""

    @property
    def names_any_class(self) -> bool:
        return False  # the memory is kept by label

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",)

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        keys, known = remember(*client.features("image"), world.classes, self.memory_per_class)
        return {**super().begin(world, client, received, local), KEYS: keys, KNOWN: known}

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        said = super().logits(world, params, seen, batch, noise)
        if batch.training and not self.train_with_memory:
            return said
        return said + self.memory_weight * recall(params[KEYS], params[KNOWN], batch.features["image"], self.sharpness)

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        found = self.memory_weight * recall(params[KEYS], params[KNOWN], batch.features["image"], self.sharpness)
        return (Mixture("memory of the client's own images", world.class_names, found, "added to the logit"),)


def remember(features: Tensor, labels: Tensor, classes: int, most: int) -> tuple[Tensor, Tensor]:
    """Keys (C, S, D) out of features (n, D) with labels (n,), and a mask (C, S) of those that are not padding."""
    keys = features.new_zeros(classes, most, features.shape[-1])
    known = features.new_zeros(classes, most)
    for label in range(classes):
        rows = features[labels == label]
        kept = min(len(rows), most)
        keys[label, :kept] = rows[torch.arange(kept, device=rows.device) * len(rows) // max(kept, 1)]
        known[label, :kept] = 1
    return keys, known


def recall(keys: Tensor, known: Tensor, images: Tensor, sharpness: float) -> Tensor:
    """Similarity of each image (B, D) to the remembered ones of every class, (B, C)."""
    likeness = torch.einsum("bd,csd->bcs", precise(images), precise(keys))
    return (known * (-sharpness * (1 - likeness)).exp()).sum(-1)
