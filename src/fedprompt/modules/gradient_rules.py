"""Rules on the gradient of a tensor, as functions that leave its value alone.

A method names one loss, and the engine takes its gradient. What a paper does to a gradient before the step (project it,
clip it, add noise) is done here on the way back, so that it also holds for a batch of clients and under every optimiser.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDING = 1e-4  # a gradient below that share of another is rounding, and has no direction


class _Aligned(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        return tensor.clone(), tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, own: Tensor, general: Tensor) -> tuple[Tensor, None]:
        product, square = (own * general).sum(), general.square().sum()
        direction = square > (ROUNDING**2) * own.square().sum()
        against = torch.where(direction, product.clamp_max(0) / square, torch.zeros_like(square))
        return own - ctx.strength * against * general, None


class _Private(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, noise: Tensor, bound: float) -> Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.bound = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (noise,) = ctx.saved_tensors
        return _cut(gradient, ctx.bound) + noise, None, None


def aligned(tensor: Tensor, strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """The tensor twice, for two losses with gradients g and b. Its own gradient is g without the part that is against b:

    g - strength * min(0, <g, b>) / ||b||^2 * b

    Where b is below 1e-4 of g it counts as zero: at a minimum of the second loss nothing is left of b but rounding.
    """
    own, general = _Aligned.apply(tensor, strength)  # type: ignore[no-untyped-call]
    return own, general


def clipped_and_noisy(tensor: Tensor, noise: Tensor, bound: float) -> Tensor:
    """The tensor; its gradient g becomes g * min(1, bound / ||g||) + noise."""
    found: Tensor = _Private.apply(tensor, noise, bound)  # type: ignore[no-untyped-call]
    return found


class _LowRank(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        tensor: Tensor, left: Tensor, right: Tensor, left_noise: Tensor, right_noise: Tensor, bound: float
    ) -> Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:5])
        ctx.bound = inputs[5]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        left, right, left_noise, right_noise = ctx.saved_tensors
        of_left = _cut(gradient @ right.mT, ctx.bound) + left_noise
        of_right = _cut(left.mT @ gradient, ctx.bound) + right_noise
        through_left = of_left @ right
        return through_left + left @ of_right - left @ (left.mT @ through_left), None, None, None, None, None


def low_rank_and_noisy(
    tensor: Tensor, left: Tensor, right: Tensor, left_noise: Tensor, right_noise: Tensor, bound: float
) -> Tensor:
    """The tensor (m, d); its gradient g is put together from those of two factors, which are cut and get noise.

    With U (m, r) and V (r, d), the columns of U and the rows of V orthonormal:

        g_U = cut(g V^T) + noise,   g_V = cut(U^T g) + noise,   g <- g_U V + U g_V - U U^T g_U V

    Without cut and noise that is the part of g in the tangent space of matrices of rank r, and g itself at full rank.
    """
    found: Tensor = _LowRank.apply(tensor, left, right, left_noise, right_noise, bound)  # type: ignore[no-untyped-call]
    return found


def _cut(gradient: Tensor, bound: float) -> Tensor:
    norm = gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny)
    return gradient * (bound / norm).clamp_max(1)
