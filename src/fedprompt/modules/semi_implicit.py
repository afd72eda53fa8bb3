"""Semi-implicit variational inference (Yin and Zhou, 2018) for prompts: the surrogate bound in a form that is safe in
float32.

A posterior h(p|x) = E_psi q(p|psi), q a diagonal Gaussian and psi = (mean, log-variance) random because its features
are masked at random. With J draws (psi^j, p^j) and S further psi~ that all j share,

    log Omega^j = log 1/(S+1) [ q(p^j|psi^j) + sum_s q(p^j|psi~^s) ]
    L_S^J       = log 1/J sum_j p(y|p^j) ( p(p^j) / Omega^j )^beta

Densities over thousands of dimensions are never formed. With e = (p - mean)/std, only differences are:

    log p(p) - log q(p|psi)        = 1/2 sum ( logvar - log s0^2 + e^2 - (p - m0)^2 / s0^2 )              prior N(m0, s0^2)
    log q(p|psi~) - log q(p|psi)   = 1/2 sum ( logvar - logvar~ + e^2 - (p - mean~)^2 exp(-logvar~) )

Masks are independent between blocks, so h is a product over blocks, and Omega may be formed block by block from the
same draws: still a lower bound, never looser in expectation, and not saturated at log(S+1) as the joint one is in many
dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INSIDE = (-2, -1)  # tokens and channels of one block's prompt


def prior_minus_posterior(
    epsilon: Tensor, mean: Tensor, logvar: Tensor, prior_mean: Tensor | float, prior_scale: float
) -> Tensor:
    """log p(p) - log q(p|psi) of p = mean + std * epsilon, by block: (..., L, v, d) to (..., L)."""
    offset = mean + (0.5 * logvar).exp() * epsilon - prior_mean
    inside = logvar - 2 * math.log(prior_scale) + epsilon.square() - offset.square() / prior_scale**2
    return 0.5 * inside.sum(INSIDE)


def others_minus_posterior(
    epsilon: Tensor, mean: Tensor, logvar: Tensor, other_mean: Tensor, other_logvar: Tensor
) -> Tensor:
    """log q(p|psi~^s) - log q(p|psi^j) by block: (J, B, L, v, d) and (S, B, L, v, d) to (S, J, B, L)."""
    other_mean, other_logvar = other_mean.unsqueeze(1), other_logvar.unsqueeze(1)
    offset = mean + (0.5 * logvar).exp() * epsilon - other_mean
    inside = logvar - other_logvar + epsilon.square() - offset.square() * (-other_logvar).exp()
    return 0.5 * inside.sum(INSIDE)


def mixture_minus_posterior(others: Tensor, layerwise: bool) -> Tensor:
    """log Omega - log q(p|psi): (S, J, B, L) to (J, B); zero when S is 0. Between -log(S+1) and, in expectation, 0."""
    others = others if layerwise else others.sum(-1, keepdim=True)
    own = torch.zeros_like(others.sum(0, keepdim=True))
    return (torch.cat([own, others]).logsumexp(0) - math.log(len(others) + 1)).sum(-1)


def surrogate_bound(log_likelihood: Tensor, log_prior_minus_mixture: Tensor, beta: Tensor | float) -> Tensor:
    """L_S^J of every sample, from (J, B) to (B,)."""
    return (log_likelihood + beta * log_prior_minus_mixture).logsumexp(0) - math.log(len(log_likelihood))


def gaussian_divergence(mean: Tensor, logvar: Tensor, prior_mean: Tensor | float, prior_scale: float) -> Tensor:
    """KL(q || prior) in closed form, (..., L, v, d) to (...)."""
    variance = prior_scale**2
    inside = logvar.exp() / variance + (mean - prior_mean).square() / variance - 1 - logvar + math.log(variance)
    return 0.5 * inside.sum((-3, *INSIDE))
