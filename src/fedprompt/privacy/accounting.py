"""Privacy accounting: epsilon of a run at a given delta, and the noise for a given epsilon.

z is the noise multiplier of `privacy.mechanism`: the noise on a release divided by its bound S. The figures protect one
whole client. Which change of a client they hide depends on where the noise is added:

| noise at | sampling | neighbours | sensitivity | computed with |
|---|---|---|---|---|
| server | all clients, or poisson | one client added or left out | S | closed form, or privacy loss distributions |
| server | fixed, n of N | one client's data replaced | 2 S | Renyi divergences |
| client, step | any | one client's data replaced | 2 S | closed form |

* T releases of multiplier m without sampling are one Gaussian mechanism of multiplier m / sqrt(T), whose epsilon is known
  in closed form (Balle and Wang 2018).
* * A client that was not drawn has released nothing, so a secret draw amplifies the privacy of noise at the server. With a
  cohort of fixed size, a client that leaves is replaced by another, so two clients change: this gives 2 S. For draws
  without replacement the library expects the noise divided by the sensitivity and does not double it, so it gets z / 2.
  Its bound is loose for small noise; poisson sampling has better figures.
* * Sampling never increases epsilon, so the closed form without it is an upper bound for every row; the smaller figure is used.
* Noise at the client or at its steps also protects against the server, which sees who replied: there is no amplification.

The noise is a discrete Gaussian on a grid (`privacy.mechanism`), and the figures are those of the continuous one. They are valid:

* Its Renyi divergences are no larger than the continuous ones, on any grid (Canonne, Kamath and Steinke 2020, theorem 4 and
  the proposition after it), and so is every figure computed from them.
* Closed form and privacy loss distributions hold for a continuous Gaussian that is rounded to the grid, since rounding
  reveals nothing. P(x) of the rounded one over P(x) of the discrete one is, within 13 sigma and up to terms far below,
  the mean of exp(-(2 x t + t^2) / (2 sigma^2)) over t in (-1/2, 1/2), which is within exp(±7.2 / sigma^2). So T releases of d
  numbers each cost at most 15 d T / sigma^2 more in epsilon, and 2 d T / 2^120 in delta. With sigma = z 2^40 steps, a million
  numbers, a thousand rounds and z = 0.1 that is 1.3e-12. On a coarse grid it would matter: at sigma = 0.7 steps
  and delta 1e-5 the library gives 6.96 for the discrete and 6.65 for the continuous mechanism.

This module is free of torch; the library `dp_accounting` is in the extra `[dp]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Literal

from fedprompt.errors import ConfigError, broken

PRECISION = 1e-4  # of a calibrated noise multiplier, relative
TINY = 1e-12  # a positive epsilon, so that its logarithm exists
LEAST_SHARE = 1e-3  # of the noise without amplification: the lower limit of the search, for any delta
GRID = 1e-4  # step of the discretised privacy losses, relative to epsilon
POINTS = 20_000  # approximate limit of these steps for one round
ORDERS = (
    1.25,
    1.5,
    1.75,
    *range(2, 33),
    40,
    48,
    64,
    96,
    128,
    512,
    1024,
)  # of Renyi divergences; the library is slow for some others


@dataclass(frozen=True)
class Plan:
    """The releases of a run."""

    noise_at: Literal["client", "server", "step"]
    releases: int
    """Noise at the server: rounds; otherwise the largest number of noised values (uploads, steps) that one client sends."""
    clients: int = 1
    """Clients that take part in training."""
    cohort: float = 1
    """How many of them are drawn for a round; the expected number with poisson sampling."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    surveys: int = 0
    """Releases of every client outside the rounds."""

    def __post_init__(self) -> None:
        for name in ("releases", "surveys"):
            if getattr(self, name) < 0:
                raise ConfigError(broken(f"plan.{name}", "be at least 0", getattr(self, name)))
        if not 0 < self.cohort <= self.clients:
            raise ConfigError(broken("plan.cohort", f"be in (0, {self.clients}], the number of clients", self.cohort))
        if self.sampling == "fixed" and self.cohort != int(self.cohort):
            raise ConfigError(broken("plan.cohort", "be a whole number unless sampling is poisson", self.cohort))

    @property
    def drawn(self) -> bool:
        """Whether a round has only some of the clients, and an observer of the releases does not know which."""
        return self.noise_at == "server" and self.cohort < self.clients

    @property
    def sensitivity(self) -> int:
        """The largest change of a release by one client, as a multiple of the bound."""
        return 2 if self.noise_at != "server" or (self.drawn and self.sampling == "fixed") else 1

    @property
    def neighbours(self) -> str:
        """The change that the figures hide."""
        return "one client's data replaced" if self.sensitivity == 2 else "one client added or left out"

    @property
    def total(self) -> int:
        return self.releases + self.surveys


@lru_cache(maxsize=1024)
def epsilon(noise: float, delta: float, plan: Plan) -> float:
    """The epsilon that a plan spends at this noise multiplier; infinite without noise, 0 if nothing is released."""
    if not noise >= 0:
        raise ConfigError(broken("privacy.noise", "be at least 0", noise))
    _check_delta(delta)
    if not plan.total:
        return 0.0
    if not noise:
        return math.inf
    multiplier = noise / plan.sensitivity
    plain = float(_library().gaussian_mechanism.get_epsilon_gaussian(multiplier / math.sqrt(plan.total), delta))
    if not plan.drawn or not plan.releases:
        return plain
    amplified = _poisson if plan.sampling == "poisson" else _without_replacement
    return min(plain, amplified(multiplier, delta, plan, plain))


def noise_for(target_epsilon: float, delta: float, plan: Plan) -> float:
    """The smallest noise multiplier (to `PRECISION`) with which the plan spends no more than this epsilon."""
    if not target_epsilon > 0:
        raise ConfigError(broken("privacy.target_epsilon", "be positive", target_epsilon))
    _check_delta(delta)
    if not plan.total:
        return 0.0
    alone = float(_library().gaussian_mechanism.get_sigma_gaussian(target_epsilon, delta))
    enough = alone * plan.sensitivity * math.sqrt(plan.total) * (1 + 1e-9)
    if not plan.drawn or not plan.releases:
        return enough
    least = enough * LEAST_SHARE
    if epsilon(least, delta, plan) <= target_epsilon:
        return least

    def excess(log_noise: float) -> float:
        return math.log(max(epsilon(math.exp(log_noise), delta, plan), TINY) / target_epsilon)

    from scipy.optimize import brentq  # type: ignore[import-untyped]

    found = math.exp(brentq(excess, math.log(least), math.log(enough), xtol=PRECISION / 2))
    while epsilon(found, delta, plan) > target_epsilon:
        found *= 1 + PRECISION / 2
    return found


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(broken("privacy.delta", "be in (0, 1)", delta))


def _poisson(multiplier: float, delta: float, plan: Plan, plain: float) -> float:
    """Each client is drawn with probability q. The step of the privacy losses follows the scale of the result, so that
    the time is short for any noise. The library rounds losses up, so the result is never too small."""
    library, probability = _library(), plan.cohort / plan.clients
    reach = 10 / multiplier + 1 / (2 * multiplier**2)
    accountant = library.pld.PLDAccountant(
        library.NeighboringRelation.ADD_OR_REMOVE_ONE, max(GRID * probability * plain, reach / POINTS)
    )
    gaussian = library.GaussianDpEvent(multiplier)
    accountant.compose(library.PoissonSampledDpEvent(probability, gaussian), plan.releases)
    if plan.surveys:
        accountant.compose(gaussian, plan.surveys)
    return float(accountant.get_epsilon(delta))


def _without_replacement(multiplier: float, delta: float, plan: Plan, plain: float) -> float:
    library, sampled = _library(), _sampled_divergences(multiplier, plan.clients, int(plan.cohort))
    orders = [order for order, _ in sampled]
    total = [plan.releases * each + plan.surveys * order / (2 * multiplier**2) for order, each in sampled]
    return float(library.rdp.compute_epsilon(orders, total, delta)[0])


@lru_cache(maxsize=256)
def _sampled_divergences(multiplier: float, clients: int, cohort: int) -> tuple[tuple[float, float], ...]:
    """Orders and Renyi divergences of one round with a cohort drawn without replacement."""
    library = _library()
    accountant = library.rdp.RdpAccountant(ORDERS, library.NeighboringRelation.REPLACE_ONE)
    event = library.SampledWithoutReplacementDpEvent(clients, cohort, library.GaussianDpEvent(multiplier))
    accountant.compose(event)
    return tuple(zip(accountant.orders.tolist(), accountant.rdp.tolist(), strict=True))


def _library() -> ModuleType:
    """Imported on first use, because it imports SciPy."""
    try:
        import dp_accounting
        import dp_accounting.gaussian_mechanism
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigError("privacy must have its accounting library, try: pip install 'fedprompt[dp]'") from error
    library: ModuleType = dp_accounting
    return library
