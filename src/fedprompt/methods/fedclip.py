"""FedCLIP (Lu et al., 2023, arXiv 2302.13485): only an attention adapter on the image feature is trained and averaged.

    A(f)     = softmax(W_2 tanh(W_1 f + b_1) + b_2)          W_1, W_2 square; f the image's feature before it is normalised
    I        = normalise(A(f) * f)                           entry by entry
    logits   = scale * I T^T,   T_c = g("a photo of a" c)    fixed

Training contrasts the images of a batch with the texts of their own labels, both ways, s_bj = scale * <I_b, T_y(j)>:

    loss = 1/2 mean_b [ -log( e^{s_bb} / sum_j e^{s_bj} )  -log( e^{s_bb} / sum_j e^{s_jb} ) ]

Several images of one class in a batch have one text. The paper's targets are still the diagonal; spreading them evenly
over the pairs of equal label would change nothing. In a row b the scores of equal labels are equal, so each has the
same loss. In the columns of one class, which are copies of each other, the diagonal picks each image of the class once,
and so does the even spread over k images in k copies. Value and gradient are the same (there is a test), so there is no
option. Classes that are not in the batch are no negatives; `objective: cross_entropy` takes all classes instead.

As in the authors' code, the adapter reads f as the projection leaves it and the product is normalised afterwards.
CLIP's f has a length of about 10, so that tanh is not linear there; with a unit vector the adapter would start out
reading little more than its biases.

Because I is normalised, the adapter is a weighting of the entries of f relative to each other: with W_2 = 0, b_2 = 0
this is zero-shot classification. W and b start as torch's linear layers do. With D = 512 there are 2 (512^2 + 512) =
525,312 numbers to send.

The paper trains with Adam (rate 5e-5, betas 0.9 and 0.98, decay 0.2) and lets every client keep its best adapter; here
it is Adam without decay, at a larger rate for few steps, and clients predict with the averaged adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Method, Seen, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_text import check_words, precise, similarity
from fedprompt.modules.init import linear_layer
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, stripped

ADAPTER = "adapter."


@register("fedclip")
@dataclass(frozen=True)
class FedCLIP(Method):
    """An averaged attention over the entries of the image feature."""

    words: Annotated[str, Field(min_length=1)] = "a photo of a"
    """Words before the class name."""
    objective: Literal["contrastive", "cross_entropy"] = "contrastive"
    """Contrast with the texts of the batch, or cross-entropy over all classes."""

    @property
    def uses_text(self) -> bool:
        return True

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image_raw",)

    def check(self, world: World, train: TrainConfig) -> None:
        check_words(world, "words", self.words)

    def init(self, world: World, generator: Stream) -> Roles:
        width = world.text.features
        drawn = {
            **linear_layer(ADAPTER + "in", width, width, generator),
            **linear_layer(ADAPTER + "out", width, width, generator),
        }
        return Roles(shared=world.placed(drawn))

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return {**received, "class_features": world.text.encode_words(self.words)}

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        feature = precise(seen.image_raw)
        adapter = {name: precise(tensor) for name, tensor in stripped(ADAPTER, params).items()}
        adapted = F.normalize(attention(adapter, feature) * feature, dim=-1)
        return similarity(world, adapted, params["class_features"])

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        if self.objective == "cross_entropy":
            return super().loss(world, params, logits, seen, batch, noise)
        return contrast(logits, batch)


def attention(weights: Tensors, features: Tensor) -> Tensor:
    """Weights (B, D) over the entries of features (B, D); they sum to one."""
    hidden = torch.tanh(F.linear(features, weights["in.weight"], weights["in.bias"]))
    return F.linear(hidden, weights["out.weight"], weights["out.bias"]).softmax(-1)


def contrast(logits: Tensor, batch: Batch) -> Tensor:
    """The symmetric contrastive loss of a batch whose logits over all classes are (B, C); padding forms no pairs."""
    pairs = logits[:, batch.labels]  # (B, B), image by text
    present = torch.zeros_like(pairs[0]) if batch.weights is None else batch.weights.log()
    own = pairs.diagonal()
    by_image = (pairs + present).logsumexp(1) - own
    by_text = (pairs.T + present).logsumexp(1) - own
    return batch.mean((by_image + by_text) / 2)
