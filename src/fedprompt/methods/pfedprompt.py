"""pFedPrompt (Guo et al., WWW 2023): one text context for all clients, and at each client a memory of its own images.

    text      P <- sum_k p_k P_k, trained and averaged as in PromptFL; logits scale * f T^T, f the image and T_c the class, unit vectors
    memory    keys F_cs: image features of up to `memory_per_class` training images s of class c of this client; no parameters
    predict   logits_c = scale * f T_c + alpha * sum_s exp(-beta (1 - f F_cs))

The memory is local: it is computed from the client's training images when needed, is part of no message, and needs no
training, so clients that never took part, and held-out ones, have one too. Of a class with too many images it keeps
some at even distances in the client's order, so that each domain is represented in proportion.

Alpha and beta are calibrated to the encoder. Tip-Adapter's alpha = 1 and beta = 5.5 fit CLIP's geometry, where two images
of a class have a cosine of 0.77; with `mini` it is 0.39, and such a memory says nothing (exp(-5.5 * 0.61) = 0.03 against
logits of 28 f T). By default each client chooses both from its own remembered images, never from test images: an image is
classified by the text and by the memory *without itself* (leave one out), for every pair of a grid,

    beta in 1, 2, 4, .. 64,   alpha in 0, 2^-4, 2^-3, .. 2^16

and of the pairs whose accuracy is within one standard error sqrt(p (1 - p) / n) of the best, p, it takes the one with the
highest likelihood: accuracy alone would choose an extreme alpha, likelihood alone is ruled by a few images that lie among
those of another class. Images whose class has no second one take no part, since the memory could only be wrong about them;
a client without any other image keeps alpha = 1 and beta = 5.5.

There is no public code, and the paper's details are not known to us: the form of the memory is Tip-Adapter's (Zhang et
al., ECCV 2022). Our choice: the memory is used only for tests. In training every image would
find itself in it, with weight 1 and its right label, which hides the errors of the context; `train_with_memory` does it
anyway. Without it the context is that of PromptFL to the bit, and with alpha = 0 the predictions too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.core.method import Batch, Client, Mixture, Seen, World, cross_entropy
from fedprompt.core.registry import register
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.methods.bases.with_text import precise
from fedprompt.methods.promptfl import PromptFL
from fedprompt.tensors import Tensors

KEYS, KNOWN = "memory.keys", "memory.known"  # (C, S, D), and (C, S) with 1 where there is a key
WEIGHT, SHARPNESS = "memory.weight", "memory.sharpness"  # alpha and beta
TIP_WEIGHT, TIP_SHARPNESS = 1.0, 5.5  # Tip-Adapter's, for CLIP
WEIGHTS = (0.0, *(2.0**power for power in range(-4, 17)))  # that a client chooses from
SHARPNESSES = tuple(2.0**power for power in range(7))


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
    memory_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Alpha, weight of the memory; null: each client calibrates it on its training images."""
    sharpness: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Beta, how fast weights fall with the distance; null: each client calibrates it on its training images."""
    train_with_memory: bool = False
    """Use the memory in training too, where each image finds itself in it."""

    @property
    def names_any_class(self) -> bool:
        return False  # the memory is kept by label

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",)

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = super().begin(world, client, received, local)
        keys, known = remember(*client.features("image"), world.classes, self.memory_per_class)
        alpha, beta = self._calibrated(world, params, keys, known)
        numbers = {WEIGHT: torch.as_tensor(alpha), SHARPNESS: torch.as_tensor(beta)}
        return {
            **params,
            KEYS: keys,
            KNOWN: known,
            **{name: value.to(precise(keys)) for name, value in numbers.items()},
        }

    def _calibrated(self, world: World, params: Tensors, keys: Tensor, known: Tensor) -> tuple[float, float]:
        """Alpha and beta: as given, or the best on the client's remembered images."""
        weights = WEIGHTS if self.memory_weight is None else (self.memory_weight,)
        sharpnesses = SHARPNESSES if self.sharpness is None else (self.sharpness,)
        if len(weights) == len(sharpnesses) == 1:
            return weights[0], sharpnesses[0]
        with torch.no_grad():
            text = world.text.encode(params["context"].unsqueeze(0), self.class_position)[0]
            return calibrate(keys, known, world.text.scale * precise(keys) @ precise(text).T, weights, sharpnesses)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        said = super().logits(world, params, seen, batch, noise)
        if batch.training and not self.train_with_memory:
            return said
        return said + self._recalled(params, batch)

    def _recalled(self, params: Tensors, batch: Batch) -> Tensor:
        return params[WEIGHT] * recall(params[KEYS], params[KNOWN], batch.features["image"], params[SHARPNESS])

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        """Alpha and beta of the client, and the greatest addition of the memory to a logit."""
        found = {"memory.weight": params[WEIGHT], "memory.sharpness": params[SHARPNESS]}
        return {**found, "memory.addition": self._recalled(params, batch).amax(-1)}

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        found = self._recalled(params, batch)
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


def calibrate(
    keys: Tensor, known: Tensor, text_logits: Tensor, weights: Sequence[float], sharpnesses: Sequence[float]
) -> tuple[float, float]:
    """Alpha and beta for keys (C, S, D), each classified by its text logits (C, S, C) and a memory without itself."""
    counts = known.sum(-1, keepdim=True).expand_as(known)
    used = (known > 0) & (counts > 1)
    if not used.any():
        return (weights[0] if len(weights) == 1 else TIP_WEIGHT), (
            sharpnesses[0] if len(sharpnesses) == 1 else TIP_SHARPNESS
        )
    images, plain = precise(keys[used]), text_logits[used]
    labels = used.nonzero()[:, 0]
    own = torch.nn.functional.one_hot(labels, len(keys)).to(images.dtype)
    pairs, right, fit = [], [], []
    for beta in sharpnesses:
        found = recall(keys, known, images, beta) - own * (-beta * (1 - images.square().sum(-1, keepdim=True))).exp()
        for alpha in weights:
            logits = plain + alpha * found.clamp_min(0)
            pairs.append((alpha, beta))
            right.append((logits.argmax(-1) == labels).double().mean())
            fit.append(-cross_entropy(logits.double(), labels).mean())
    accuracy, likelihood = torch.stack(right), torch.stack(fit)
    best = accuracy.max()
    error = ((best * (1 - best)).clamp_min(1 / len(labels)) / len(labels)).sqrt()
    return pairs[int(likelihood.masked_fill(accuracy < best - error, -torch.inf).argmax())]


def recall(keys: Tensor, known: Tensor, images: Tensor, sharpness: Tensor | float) -> Tensor:
    """Similarity of each image (B, D) to the remembered ones of every class, (B, C)."""
    likeness = torch.einsum("bd,csd->bcs", precise(images), precise(keys))
    return (known * (-sharpness * (1 - likeness)).exp()).sum(-1)
