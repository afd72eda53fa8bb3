"""Whether a difference is more than chance: bootstrap intervals, the sign test, ranks over several tasks. numpy only.

- The interval is a percentile bootstrap over the units of every stratum. As there are few units (clients of a seed), it is
  widened: draws are stretched by sqrt(n / (n - 1)) in each stratum, and by the quantile of Student's t over that of the normal
  distribution, with Satterthwaite's degrees of freedom (Hesterberg, 2015, gives the reasons).
- Ranks over tasks are compared with Friedman's test and the critical difference of Nemenyi (Demsar, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
DRAWS = 2000
MOST_DRAWN = 2000  # units of a stratum that are drawn one by one; above, the mean of a draw is normal
LEAST_FREEDOM = 4  # units, less one for each stratum; with fewer, an interval would be a guess


@dataclass(frozen=True)
class Stratum:
    """Units that are drawn with replacement, and the weight of their mean in the estimate."""

    values: np.ndarray
    weight: float


@dataclass(frozen=True)
class Interval:
    """The estimate, and between which values it is with 95 % confidence."""

    estimate: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`ahead` where the whole interval is above 0, `behind` where it is below."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


def enough(strata: Sequence[Stratum]) -> bool:
    """Whether there are enough units for an interval."""
    sizes = [len(each.values) for each in strata]
    return bool(sizes) and min(sizes) > 1 and sum(sizes) - len(sizes) >= LEAST_FREEDOM


def freedom(strata: Sequence[Stratum]) -> float:
    """Satterthwaite's degrees of freedom, at least 2; infinite if no unit differs from its stratum."""
    parts = [each.weight**2 * float(np.var(each.values, ddof=1)) / len(each.values) for each in strata]
    below = sum(part**2 / (len(each.values) - 1) for part, each in zip(parts, strata, strict=True))
    return max(2.0, sum(parts) ** 2 / below) if below else math.inf


def bootstrap(strata: Sequence[Stratum], generator: np.random.Generator, draws: int = DRAWS) -> Interval:
    """The weighted sum of the means, of strata with `enough` units."""
    estimate = sum(each.weight * float(each.values.mean()) for each in strata)
    moved = np.zeros(draws)  # from the estimate
    for each in strata:
        moved += each.weight * _drawn_means(each.values, generator, draws)
    low, high = np.quantile(moved, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) * (t_quantile(freedom(strata)) / Z)
    return Interval(estimate, estimate + float(low), estimate + float(high))


def _drawn_means(values: np.ndarray, generator: np.random.Generator, draws: int) -> np.ndarray:
    """By how much the mean of units drawn with replacement is off, (draws,), with the variance of the real error."""
    count, centred = len(values), values - values.mean()
    if count > MOST_DRAWN:
        return generator.normal(0, np.std(values, ddof=1) / math.sqrt(count), draws)
    means: np.ndarray = centred[generator.integers(count, size=(draws, count))].mean(axis=1)
    return means * math.sqrt(count / (count - 1))


def t_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t. With t = sqrt(n) tan(a) its density is that of cos(a)^(n - 1), which is summed; for
    many degrees of freedom it is a series (Abramowitz and Stegun, 26.7.5).
    """
    if degrees > 200:
        first, second = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
        return float(Z + first / degrees + second / degrees**2)
    angles = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angles).clip(0) ** (degrees - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(degrees) * math.tan(np.interp(LEVEL, below / below[-1], angles)))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval of the mean of repetitions; None for a single one."""
    if len(values) < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = t_quantile(len(values) - 1) * error
    return Interval(mean, mean - reach, mean + reach)


def sign_test(ahead: int, behind: int) -> float:
    """The exact two-sided p of so many signs if both were equally likely; ties are left out before."""
    total, fewer = ahead + behind, min(ahead, behind)
    return min(1.0, 2 * sum(math.comb(total, number) for number in range(fewer + 1)) * 0.5**total)


@dataclass(frozen=True)
class Ranking:
    """Mean ranks of some methods over tasks; rank 1 is the best."""

    ranks: tuple[float, ...]
    tasks: int
    p: float
    """Of Friedman's test: that all methods are equally good."""
    critical: float
    """Mean ranks that differ by less are level at 95 % confidence."""


def rank_over_tasks(scores: np.ndarray) -> Ranking:
    """Scores (tasks, methods), higher is better; equal scores share the mean of their ranks."""
    tasks, methods = scores.shape
    better = (scores[:, None, :] > scores[:, :, None]).sum(-1)
    equal = (scores[:, None, :] == scores[:, :, None]).sum(-1)
    each = better + (equal + 1) / 2
    ranks = each.mean(axis=0)
    among = ((each - (methods + 1) / 2) ** 2).sum()  # less than without ties, which corrects for them
    chi2 = (methods - 1) * tasks**2 * ((ranks - (methods + 1) / 2) ** 2).sum() / among if among else 0.0
    critical = studentised_range(methods) * math.sqrt(methods * (methods + 1) / (12 * tasks))
    return Ranking(tuple(ranks.tolist()), tasks, chi2_tail(float(chi2), methods - 1), critical)


def chi2_tail(value: float, degrees: int) -> float:
    """The probability of a larger value."""
    half, odd = value / 2, degrees % 2
    tail = math.erfc(math.sqrt(half)) if odd else 0.0
    powers = [place + odd / 2 for place in range(degrees // 2)]
    return tail + math.exp(-half) * sum(float(half**power) / math.gamma(power + 1) for power in powers)


def studentised_range(count: int) -> float:
    """The 95 % quantile of the range of normal values with known variance: P(q) = n Int phi(x) (Phi(x) - Phi(x - q))^(n-1) dx."""
    x = np.linspace(-8, 8, 2001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)

    def share(q: float) -> float:
        between = _normal(x) - _normal(x - q)
        return float(count * (density * between ** (count - 1)).sum() * (x[1] - x[0]))

    low, high = 0.0, 16.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < LEVEL else (low, middle)
    return low


def _normal(x: np.ndarray) -> np.ndarray:
    """The distribution function of the normal distribution."""
    return np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])
