"""Instance prompts from features without prompts: one small network per block that mixes *tokens*, equal for all
channels.

For block i, with features f (B, T, d) and a mask m (B, T) that always keeps the CLS row:

    z = LayerNorm(m * f)          a masked row becomes the norm's bias; kept rows are not rescaled
    out = MLP(z^T)^T              (B, d, T) -> (B, d, v) -> (B, v, d)

The networks of all blocks are stacked, and several of them (mean, log-variance) share the norm and one batched product.
Because a mask multiplies whole rows, it is applied to the first layer's weights instead of the features, which are far
larger: with x the normalised rows,

    W z = (W * m) (gamma * x) + (sum_t W_t) beta
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.errors import ContractError
from fedprompt.modules.init import linear_layer
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

NORM_EPSILON = 1e-6
MeanStart = Literal["default", "cls", "mean"]


def initial_norm(blocks: int, width: int) -> Tensors:
    return {"norm.weight": torch.ones(blocks, width), "norm.bias": torch.zeros(blocks, width)}


def initial_network(blocks: int, tokens: int, hidden: int, out: int, generator: Stream) -> Tensors:
    """Linear layers at their usual start, uniform in ±1/sqrt(fan-in); with `hidden` 0 there is one layer."""
    inner = linear_layer("in", hidden, tokens, generator, stacked=(blocks,)) if hidden else {}
    return {**inner, **linear_layer("out", out, hidden or tokens, generator, stacked=(blocks,))}


def linear_from(start: MeanStart, network: Tensors, scale: float) -> Tensors:
    """A linear network whose output is the normalised CLS row or the mean of all rows; "default" is random.

    Of several tokens that start from the mean, each starts from other rows: equal ones would stay equal.
    """
    if start == "default":
        return network
    weight = torch.zeros_like(network["out.weight"])
    if start == "cls":
        weight[..., 0] = scale
    else:
        for token in range(weight.shape[-2]):
            rows = range(token, weight.shape[-1], weight.shape[-2])
            weight[..., token, rows] = scale / len(rows)
    return {"out.weight": weight, "out.bias": torch.zeros_like(network["out.bias"])}


def constant_network(network: Tensors, value: float) -> Tensors:
    """The same network with the constant output `value`, until it is trained."""
    return {
        **network,
        "out.weight": torch.zeros_like(network["out.weight"]),
        "out.bias": torch.full_like(network["out.bias"], value),
    }


def draw_masks(shape: Sequence[int], keep: float, generator: Stream) -> Tensor:
    """Ones with probability `keep`, zeros otherwise; the first of the last axis, CLS, is always kept."""
    masks = (generator.uniform(*shape) < keep).float()
    masks[..., 0] = 1
    return masks


def normalised(features: Tensor) -> Tensor:
    """Rows with mean 0 and variance 1, before any scale and shift is learned."""
    return F.layer_norm(features, features.shape[-1:], eps=NORM_EPSILON)


def unit_length(tokens: Tensor) -> Tensor:
    """Tokens of root mean square 1, or smaller ones where there is next to nothing to scale."""
    return tokens / (tokens.square().mean(-1, keepdim=True) + NORM_EPSILON).sqrt()


def within(values: Tensor, least: float, most: float) -> Tensor:
    """The values cut to a range, with the gradient of uncut ones: a value outside can come back."""
    return values + (values.clamp(least, most) - values).detach()


def encode(norm: Tensors, networks: Sequence[Tensors], features: Tensor, masks: Tensor) -> list[Tensor]:
    """Features (B, L, T, d) under masks (K, B, L, T) to one output (K, B, L, v, d) per network."""
    first = [network.get("in.weight", network["out.weight"]) for network in networks]
    if features.shape[-2] != first[0].shape[-1]:
        raise ContractError(
            f"the encoder mixes {first[0].shape[-1]} tokens, but the image has {features.shape[-2]}: "
            "it can only be used at the resolution it was trained at"
        )
    rows = normalised(features) * norm["norm.weight"][:, None, :]  # (B, L, T, d)
    weight = torch.cat(first, dim=1)  # (L, R, T), R the first-layer rows of all networks
    draws = len(masks)
    masked = weight.unsqueeze(1) * masks.permute(1, 2, 0, 3).unsqueeze(-2)  # (B, L, K, R, T)
    mixed = (masked.flatten(2, 3) @ rows).unflatten(2, (draws, -1))  # (B, L, K, R, d)
    mixed = mixed.permute(2, 0, 1, 3, 4) + weight.sum(-1)[..., None] * norm["norm.bias"][:, None, :]
    outputs = []
    for network, part in zip(networks, mixed.split([each.shape[1] for each in first], dim=3), strict=True):
        if "in.weight" in network:
            hidden = F.gelu(part + network["in.bias"][..., None])
            part = torch.einsum("kblhd,lvh->kblvd", hidden, network["out.weight"])
        outputs.append(part + network["out.bias"][..., None])
    return outputs
