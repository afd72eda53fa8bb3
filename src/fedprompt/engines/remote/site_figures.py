"""The figures of an evaluation that leave a site, by its policy."""

from __future__ import annotations

from fractions import Fraction

from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.privacy.discrete_laplace import discrete_laplace

SENSITIVITY = 2  # total change of hits and misses when one test image is replaced


def released(policy: SitePolicy, result: ClientResult) -> ClientResult:
    """All figures, counts alone, or counts with noise; never which images are answered correctly."""
    if policy.evaluate == "all":
        return result.to_send()
    if policy.evaluate == "noised":
        return noised(result, policy.evaluation_epsilon)
    return ClientResult(result.samples, result.correct, domains=_large_domains(result, policy.least_test_images))


def _large_domains(result: ClientResult, least: int) -> dict[str, list[int]]:
    """Domains with enough images. The hidden ones are enough together, or subtraction from the total would show them."""
    by_size = sorted(result.domains, key=lambda name: result.domains[name][0])
    hidden = 0
    while by_size and (result.domains[by_size[0]][0] < least or 0 < hidden < least):
        hidden += result.domains[by_size.pop(0)][0]
    return {name: counts for name, counts in result.domains.items() if name in by_size}


def noised(result: ClientResult, epsilon: float) -> ClientResult:
    """Hits and misses, each with discrete Laplace noise. Negative values become 0, which costs no privacy."""
    scale = SENSITIVITY / Fraction(epsilon)
    hits = max(0, result.correct + discrete_laplace(scale))
    misses = max(0, result.samples - result.correct + discrete_laplace(scale))
    return ClientResult(max(1, hits + misses), hits)


def nothing_right(result_samples: int) -> ClientResult:
    """The result that replaces a failed evaluation in a private run."""
    return ClientResult(result_samples, 0)
