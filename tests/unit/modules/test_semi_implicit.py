"""The bound against a toy whose integrals are known, and the properties that hold in any dimension."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedprompt.modules.semi_implicit import (
    gaussian_divergence,
    mixture_minus_posterior,
    others_minus_posterior,
    prior_minus_posterior,
    surrogate_bound,
)

LOG_EVIDENCE, ELBO = -1.515512, -2.229366
TOY_LOGVAR = 2 * math.log(0.5)


def as_prompts(values: Tensor) -> Tensor:
    """(K, B) numbers as (K, B, 1, 1, 1) prompts."""
    return values[..., None, None, None]


def toy_terms(means: Tensor, epsilon: Tensor, other_means: Tensor) -> tuple[Tensor, Tensor]:
    """psi = +-1, q = N(psi, 1/4), prior N(0, 1), y = 1 seen through N(y; p, 1): log-likelihood and log p - log Omega, (J, B)."""
    logvar = torch.full_like(means, TOY_LOGVAR)
    own = (as_prompts(epsilon), as_prompts(means), as_prompts(logvar))
    others = as_prompts(other_means)
    delta = others_minus_posterior(*own, others, torch.full_like(others, TOY_LOGVAR))
    ratio = prior_minus_posterior(*own, 0.0, 1.0).sum(-1) - mixture_minus_posterior(delta, layerwise=False)
    point = means + 0.5 * epsilon
    return -0.5 * (1 - point).square() - 0.5 * math.log(2 * math.pi), ratio


def toy_bound_by_quadrature(samples: int) -> float:
    """E[L_S^1]: Gauss-Hermite over epsilon, the two psi, and how many of the S other psi are +1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    epsilon = torch.from_numpy(nodes)[None]
    total = 0.0
    for own, plus in itertools.product((-1.0, 1.0), range(samples + 1)):
        others = torch.tensor([1.0] * plus + [-1.0] * (samples - plus), dtype=torch.float64)[:, None].expand(-1, 80)
        likelihood, ratio = toy_terms(torch.full_like(epsilon, own), epsilon, others)
        mean = float((surrogate_bound(likelihood, ratio, 1.0) * torch.from_numpy(weights)).sum() / weights.sum())
        total += 0.5 * math.comb(samples, plus) / 2**samples * mean
    return total


def test_golden_bounds_of_the_toy() -> None:
    assert toy_bound_by_quadrature(0) == pytest.approx(-2.862086, abs=1e-6)
    assert toy_bound_by_quadrature(1) == pytest.approx(-2.545726, abs=1e-5)
    assert toy_bound_by_quadrature(1) - toy_bound_by_quadrature(0) == pytest.approx(0.316360, abs=1e-5)


@pytest.mark.parametrize(
    ("samples", "golden", "error"),
    [(2, -2.431, 0.0024), (5, -2.316, 0.0024), (20, -2.255, 0.0024), (100, -2.239, 0.0046)],
)
def test_golden_monte_carlo_bounds_of_the_toy(samples: int, golden: float, error: float) -> None:
    assert toy_bound_by_quadrature(samples) == pytest.approx(golden, abs=3 * error)


def test_the_bound_rises_with_more_samples_to_the_true_elbo_and_stays_below_the_evidence() -> None:
    bounds = [toy_bound_by_quadrature(samples) for samples in (0, 1, 2, 5, 20, 100)]
    assert bounds == sorted(bounds)
    assert bounds[-1] < min(ELBO, LOG_EVIDENCE)
    assert ELBO - bounds[-1] < 0.012


@pytest.mark.parametrize(
    ("samples", "draws", "golden"), [(5, 2, -1.909), (5, 5, -1.676), (5, 20, -1.578), (0, 5, -2.135), (0, 20, -1.919)]
)
def test_golden_bounds_with_several_draws(samples: int, draws: int, golden: float) -> None:
    generator, size = torch.Generator().manual_seed(0), 100_000
    sign = lambda *shape: 2.0 * torch.randint(0, 2, shape, generator=generator, dtype=torch.float64) - 1  # noqa: E731
    epsilon = torch.randn(draws, size, generator=generator, dtype=torch.float64)
    bound = surrogate_bound(*toy_terms(sign(draws, size), epsilon, sign(samples, size)), 1.0)
    error = float(bound.std() / size**0.5)
    assert float(bound.mean()) == pytest.approx(golden, abs=0.0015 + 4 * error)


def posterior(
    draws: int, size: int, shape: tuple[int, int, int], seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    return torch.randn(draws, size, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_the_stable_form_equals_the_densities_written_out() -> None:
    """Against log-densities of torch.distributions in float64, values and gradients."""
    shape = (3, 2, 4)
    leaves = [
        posterior(2, 5, shape, 1),
        0.3 * posterior(2, 5, shape, 2),
        posterior(3, 5, shape, 3),
        0.3 * posterior(3, 5, shape, 4),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    mean, logvar, other_mean, other_logvar = leaves
    epsilon = posterior(2, 5, shape, 0)
    likelihood = posterior(2, 5, (1, 1, 1), 6)[..., 0, 0, 0]
    ratio = prior_minus_posterior(epsilon, mean, logvar, 0.2, 0.7).sum(-1) - mixture_minus_posterior(
        others_minus_posterior(epsilon, mean, logvar, other_mean, other_logvar), layerwise=False
    )
    stable = surrogate_bound(likelihood, ratio, 0.3)

    prompt = mean + (0.5 * logvar).exp() * epsilon
    density = lambda m, s: torch.distributions.Normal(m, (0.5 * s).exp()).log_prob(prompt).sum((-3, -2, -1))  # noqa: E731
    inside = [density(mean, logvar), *(density(m, s) for m, s in zip(other_mean, other_logvar, strict=True))]
    omega = torch.stack(inside).logsumexp(0) - math.log(4)
    exact = [torch.tensor(value, dtype=torch.float64) for value in (0.2, 0.7)]
    prior = torch.distributions.Normal(*exact).log_prob(prompt).sum((-3, -2, -1))
    naive = (likelihood + 0.3 * (prior - omega)).logsumexp(0) - math.log(2)
    torch.testing.assert_close(stable, naive, atol=1e-10, rtol=1e-10)
    for ours, theirs in zip(
        torch.autograd.grad(stable.sum(), leaves, retain_graph=True),
        torch.autograd.grad(naive.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 4])
def test_equal_posteriors_need_no_correction(samples: int, layerwise: bool) -> None:
    mean, logvar, epsilon = (posterior(1, 6, (4, 2, 8), seed) for seed in (1, 2, 3))
    others = others_minus_posterior(
        epsilon, mean, logvar, mean.expand(samples, -1, -1, -1, -1), logvar.expand(samples, -1, -1, -1, -1)
    )
    assert mixture_minus_posterior(others, layerwise).abs().max() < 1e-12


def test_the_correction_is_at_most_log_of_the_mixture_and_positive_on_average() -> None:
    mean, logvar, epsilon = (posterior(1, 4000, (2, 1, 2), seed) for seed in (1, 2, 3))
    others = others_minus_posterior(
        epsilon, mean, logvar, posterior(3, 4000, (2, 1, 2), 4), posterior(3, 4000, (2, 1, 2), 5)
    )
    gained = -mixture_minus_posterior(others, layerwise=False)
    assert gained.max() <= math.log(4) + 1e-12
    assert gained.mean() > 0


@pytest.mark.parametrize(("samples", "joint", "layerwise"), [(1, 0.511, 0.757), (3, 0.918, 1.176)])
def test_a_mixture_by_block_is_never_looser_in_expectation(samples: int, joint: float, layerwise: float) -> None:
    """Three blocks, psi = +-1 in each, sigma 0.7: the golden values of the spec."""
    generator, size = torch.Generator().manual_seed(0), 100_000
    sign = lambda count: 2.0 * torch.randint(0, 2, (count, size, 3, 1, 1), generator=generator).double() - 1  # noqa: E731
    mean, other = sign(1), sign(samples)
    logvar = torch.full_like(mean, 2 * math.log(0.7))
    epsilon = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    others = others_minus_posterior(epsilon, mean, logvar, other, logvar.expand_as(other))
    assert float(-mixture_minus_posterior(others, False).mean()) == pytest.approx(joint, abs=0.01)
    assert float(-mixture_minus_posterior(others, True).mean()) == pytest.approx(layerwise, abs=0.01)


def test_without_mixture_the_expected_bound_is_likelihood_minus_divergence() -> None:
    """S = 0, J = 1: Monte Carlo against the closed divergence, within 3 standard errors."""
    size = 50_000
    mean = posterior(1, 1, (2, 1, 3), 1).expand(1, size, -1, -1, -1)
    logvar = 0.5 * posterior(1, 1, (2, 1, 3), 2).expand(1, size, -1, -1, -1)
    epsilon = posterior(1, size, (2, 1, 3), 3)
    sampled = prior_minus_posterior(epsilon, mean, logvar, 0.1, 0.8).sum(-1)
    exact = gaussian_divergence(mean[:, :1], logvar[:, :1], 0.1, 0.8)
    assert abs(float(-sampled.mean() - exact)) < 3 * float(sampled.std()) / size**0.5
    reference = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean[0, 0], (0.5 * logvar[0, 0]).exp()), torch.distributions.Normal(0.1, 0.8)
    ).sum()
    torch.testing.assert_close(exact.squeeze(), reference)


@pytest.mark.parametrize("std", [1e-4, 1e-2, 1.0, 10.0])
@pytest.mark.parametrize("layerwise", [False, True])
def test_float32_holds_in_9216_dimensions_and_gradients_reach_every_posterior(std: float, layerwise: bool) -> None:
    shape = (12, 1, 768)
    mean, other_mean = posterior(1, 3, shape, 1, torch.float32), posterior(1, 3, shape, 1, torch.float32)
    other_mean = other_mean + 0.02 * std * posterior(1, 3, shape, 2, torch.float32)  # near enough not to saturate
    leaves = [mean, torch.full_like(mean, 2 * math.log(std)), other_mean, torch.full_like(mean, 2 * math.log(std))]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    epsilon = posterior(1, 3, shape, 3, torch.float32)
    others = others_minus_posterior(epsilon, *leaves)
    ratio = prior_minus_posterior(epsilon, leaves[0], leaves[1], 0.0, 1.0).sum(-1) - mixture_minus_posterior(
        others, layerwise
    )
    bound = surrogate_bound(torch.zeros(1, 3), ratio, 1 / 9216).sum()
    assert torch.isfinite(bound)
    for grad in torch.autograd.grad(bound, leaves):
        assert torch.isfinite(grad).all()
        assert grad.abs().max() > 0
