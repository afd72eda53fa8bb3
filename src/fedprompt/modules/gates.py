"""Gates that mix experts: text features T (E, C, D) of E prompts, weighed for every image by its content.

Expert 0 is the client's own. A mask (E,) marks the experts that exist; the others have weight zero. Images and texts
are pooled from D to w dimensions before an attention reads them.

Attention (one for all classes; W_* are w x w with biases, h heads):

    q = W_q pool(I) + b_q,   k_e = W_k pool(T_e) + b_k,   v_e = W_v pool(T_e) + b_v
    A[b, c, h, e] = softmax_e( scaling * q[b, h] . k[e, c, h] )
    M[b, c] = W_o concat_h( sum_e A[b, c, h, e] v[e, c, h] ) + b_o,        score[b, c] = pool(I_b) . M[b, c]

M is never computed: W_o^T pool(I) is multiplied with the values head by head, and b_o with pool(I). That costs one
product per image instead of one per image and class.

Linear: a[b, e] = softmax_e( W pool(I_b) + b ), the same for all classes, on text features at full width:

    score[b, c] = I_b . sum_e a[b, e] T_e[c]
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.modules.init import linear_layer
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

Pooling = Literal["stride", "mean"]

PARTS = ("query", "key", "value", "output")


def pooled(features: Tensor, width: int, how: Pooling) -> Tensor:
    """The last axis cut into `width` runs of equal length: the first number of each, or their mean. Not normalised
    again.
    """
    runs = features.unflatten(-1, (width, -1))
    return runs[..., 0] if how == "stride" else runs.mean(-1)


def attention_start(width: int, generator: Stream) -> Tensors:
    """4 (w^2 + w) numbers."""
    layers = [linear_layer(part, width, width, generator) for part in PARTS]
    return {name: tensor for layer in layers for name, tensor in layer.items()}


def attention_weights(gate: Tensors, image: Tensor, text: Tensor, known: Tensor, heads: int, scaling: float) -> Tensor:
    """A (B, C, h, E) of pooled images (B, w) and pooled texts (E, C, w)."""
    query, key = _heads(_linear(gate, "query", image), heads), _heads(_linear(gate, "key", text), heads)
    scores = scaling * torch.einsum("bhx,echx->bche", query, key)
    return _softmax(scores, known)


def attention_scores(gate: Tensors, weights: Tensor, image: Tensor, text: Tensor) -> Tensor:
    """pool(I) . M (B, C), given A (B, C, h, E)."""
    heads = weights.shape[-2]
    value, asked = _heads(_linear(gate, "value", text), heads), _heads(image @ gate["output.weight"], heads)
    met = torch.einsum("bhx,echx->bche", asked, value)
    return (weights * met).sum((-2, -1)) + (image @ gate["output.bias"]).unsqueeze(-1)


def linear_weights(gate: Tensors, image: Tensor, known: Tensor) -> Tensor:
    """a (B, E) of pooled images (B, w)."""
    return _softmax(_linear(gate, "linear", image), known)


def linear_scores(weights: Tensor, image: Tensor, text: Tensor) -> Tensor:
    """I . sum_e a_e T_e (B, C) of images (B, D) and texts (E, C, D), given a (B, E)."""
    return torch.einsum("be,bec->bc", weights, torch.einsum("bd,ecd->bec", image, text))


def by_image(values: Tensor) -> Tensor:
    """The mean over all axes but the first (B,)."""
    return values.reshape(len(values), -1).mean(1)


def entropy(weights: Tensor, known: Tensor) -> Tensor:
    """Entropy (B,) of the weights of every image, as a share of the largest possible: 1 is uniform, 0 is one expert."""
    largest = known.sum().log()
    found = by_image(torch.special.entr(weights).sum(-1))
    return torch.where(largest > 0, found / largest, torch.zeros_like(found))


def _softmax(scores: Tensor, known: Tensor) -> Tensor:
    return torch.where(known > 0, scores, float("-inf")).softmax(-1)


def _linear(gate: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, gate[f"{name}.weight"], gate[f"{name}.bias"])


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))
