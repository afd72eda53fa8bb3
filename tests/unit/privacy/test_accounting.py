"""Epsilon against golden values of the library's own tests, closed forms and sums over a grid that know nothing of the library."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.config import PRIVACY_PRESETS
from fedprompt.errors import ConfigError
from fedprompt.privacy.accounting import Plan, epsilon, noise_for

pytestmark = pytest.mark.unit
dp_accounting = pytest.importorskip("dp_accounting")


def everybody(rounds: int, **changes: Any) -> Plan:
    return replace(Plan("server", rounds, clients=50, cohort=50), **changes)


def drawn(rounds: int, cohort: float = 10, clients: int = 100, sampling: Any = "poisson", surveys: int = 0) -> Plan:
    return Plan("server", rounds, clients, cohort, sampling, surveys)


def gaussian_delta(multiplier: float, eps: float) -> float:
    """Theorem 8 of Balle and Wang (2018) in plain error functions."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    half = 1 / (2 * multiplier)
    return below(half - eps * multiplier) - math.exp(eps) * below(-half - eps * multiplier)


def drawn_delta(multiplier: float, q: float, eps: float) -> float:
    """The divergence of order e^eps between (1 - q) N(0) + q N(1) and N(0), the worse way round, summed over a grid."""
    x = np.linspace(-40, 40, 400_001) * max(multiplier, 1)
    without = np.exp(-(x**2) / (2 * multiplier**2))
    mixed = (1 - q) * without + q * np.exp(-((x - 1) ** 2) / (2 * multiplier**2))
    scale = (x[1] - x[0]) / (multiplier * math.sqrt(2 * math.pi))
    one, other = np.maximum(mixed - math.exp(eps) * without, 0), np.maximum(without - math.exp(eps) * mixed, 0)
    return float(max(one.sum(), other.sum()) * scale)


def test_golden_values_of_the_library() -> None:
    assert epsilon(math.sqrt(3), 0.126936, everybody(3)) == pytest.approx(1, abs=1e-3)
    assert epsilon(0.5, 0.15594, drawn(3, 20)) == pytest.approx(1, abs=1e-3)
    renyi = epsilon(
        4.530877117, 1e-6, everybody(1)
    )  # the multiplier that Renyi divergences, a bound, take for epsilon 1
    assert 0.85 < renyi < 1


@pytest.mark.parametrize("rounds", [1, 100])
@pytest.mark.parametrize(("noise", "delta"), [(0.7, 1e-5), (3.0, 1e-3), (12.0, 0.05)])
def test_everybody_every_round_is_one_gaussian(rounds: int, noise: float, delta: float) -> None:
    spent = epsilon(noise, delta, everybody(rounds))
    if spent > 0:
        assert gaussian_delta(noise / math.sqrt(rounds), spent) == pytest.approx(delta, rel=1e-6)
    else:
        assert gaussian_delta(noise / math.sqrt(rounds), 0) <= delta
    rdp = dp_accounting.rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(noise), rounds).get_epsilon(delta)
    pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    assert pld.compose(dp_accounting.GaussianDpEvent(noise), rounds).get_epsilon(delta) == pytest.approx(
        spent, abs=1e-3
    )
    assert spent <= rdp + 1e-9
    assert rdp <= 1.15 * spent or delta > 1e-4


@pytest.mark.parametrize("noise_at", ["client", "step"])
def test_noise_at_the_client_hides_a_replacement_and_no_draw_helps(noise_at: Any) -> None:
    """From +S to -S is 2 S: in units of the noise z S, a Gaussian mechanism of multiplier z / 2."""
    plan = Plan(noise_at, 4, clients=100, cohort=10)
    assert gaussian_delta(3.0 / 2 / math.sqrt(4), epsilon(3.0, 1e-5, plan)) == pytest.approx(1e-5, rel=1e-6)
    assert epsilon(3.0, 1e-5, plan) == epsilon(3.0, 1e-5, replace(plan, cohort=100))
    assert epsilon(3.0, 1e-5, plan) == epsilon(1.5, 1e-5, everybody(4))
    assert (plan.neighbours, everybody(4).neighbours) == ("one client's data replaced", "one client added or left out")


@pytest.mark.parametrize(("noise", "q", "delta"), [(1.0, 0.1, 1e-5), (0.6, 0.5, 1e-3), (4.0, 0.25, 1e-4)])
def test_one_poisson_round_against_a_sum_over_a_grid(noise: float, q: float, delta: float) -> None:
    spent = epsilon(noise, delta, drawn(1, 100 * q))
    assert drawn_delta(noise, q, spent) == pytest.approx(delta, rel=1e-2)


def test_poisson_rounds_agree_with_renyi_divergences_and_end_at_everybody() -> None:
    accountant = dp_accounting.rdp.RdpAccountant([*range(2, 64)])
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(event, 30).compose(dp_accounting.GaussianDpEvent(2.0))
    assert 0.8 < epsilon(2.0, 1e-5, drawn(30, surveys=1)) / accountant.get_epsilon(1e-5) < 1
    assert epsilon(2.0, 1e-5, drawn(30, 100)) == epsilon(2.0, 1e-5, everybody(30))
    assert epsilon(2.0, 1e-5, drawn(30, 99.99)) == pytest.approx(epsilon(2.0, 1e-5, everybody(30)), rel=2e-3)


def test_a_fixed_number_of_places_takes_the_noise_over_twice_the_bound() -> None:
    """Places that others take: between the replaced client at +S and all others at -S lie 2 S. The figure of the library
    holds for that pair when it is given z / 2, and would not if it were given z."""
    plan = drawn(1, 10, sampling="fixed")
    assert drawn_delta(3.0 / 2, 0.1, epsilon(3.0, 1e-5, plan)) <= 1e-5
    assert drawn_delta(3.0 / 2, 0.1, epsilon(6.0, 1e-5, plan)) > 1e-5
    accountant = dp_accounting.rdp.RdpAccountant(
        [*range(2, 65)], neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    gaussian = dp_accounting.GaussianDpEvent(4.0)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 10, gaussian), 20).compose(gaussian)
    spent = epsilon(8.0, 1e-5, drawn(20, sampling="fixed", surveys=1))
    assert spent == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)


def test_a_draw_never_costs_more_than_none() -> None:
    for noise in (0.05, 0.5, 5.0):
        fixed, poisson = (epsilon(noise, 1e-5, drawn(20, 50, sampling=kind)) for kind in ("fixed", "poisson"))
        assert poisson <= epsilon(noise, 1e-5, everybody(20))
        assert fixed <= epsilon(noise / 2, 1e-5, everybody(20))


@settings(max_examples=40)
@given(
    st.floats(0.1, 50), st.integers(1, 500), st.sampled_from([1e-6, 1e-3, 0.05]), st.sampled_from(["client", "server"])
)
def test_closed_forms_grow_with_releases_and_shrink_with_noise(
    noise: float, count: int, delta: float, where: Any
) -> None:
    plan = Plan(where, count)
    spent = epsilon(noise, delta, plan)
    assert spent <= epsilon(noise, delta, replace(plan, releases=count + 1))
    assert spent == epsilon(noise, delta, replace(plan, releases=count - 1, surveys=1))
    assert spent >= epsilon(noise * 1.1, delta, plan)
    assert spent <= epsilon(noise, delta / 2, plan)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_drawn_rounds_grow_with_rounds_and_share_and_shrink_with_noise(sampling: Any) -> None:
    def spent(noise: float = 3.0, rounds: int = 10, cohort: int = 10, surveys: int = 0) -> float:
        return epsilon(noise, 1e-5, drawn(rounds, cohort, sampling=sampling, surveys=surveys))

    assert spent(rounds=0) == 0 < spent() < spent(rounds=20) < spent(rounds=40)
    assert spent() < spent(cohort=20) < spent(cohort=40)
    assert spent() > spent(noise=4.0) > spent(noise=8.0)
    assert spent() < spent(surveys=1)


def test_without_noise_nothing_is_private_and_without_a_release_everything_is() -> None:
    for plan in (everybody(1), Plan("client", 1), drawn(1), drawn(1, sampling="fixed"), drawn(0, surveys=1)):
        assert epsilon(0.0, 1e-5, plan) == math.inf
        assert epsilon(0.0, 1e-5, replace(plan, releases=0, surveys=0)) == 0


@pytest.mark.parametrize(
    "plan", [everybody(30), Plan("client", 7), Plan("step", 300, surveys=1), drawn(10), drawn(10, sampling="fixed")]
)
def test_noise_for_an_epsilon_is_the_least_that_keeps_to_it(plan: Plan) -> None:
    noise = noise_for(3.0, 1e-5, plan)
    assert epsilon(noise, 1e-5, plan) <= 3.0
    assert epsilon(noise * (1 - 3e-4), 1e-5, plan) > 3.0
    assert noise_for(3.0, 1e-5, replace(plan, releases=0, surveys=0)) == 0


def test_a_delta_that_allows_everything_still_gets_some_noise() -> None:
    """One round with one client of a thousand: with probability 0.999 a client is not even asked."""
    plan = drawn(1, 1, 1000)
    assert 0 < noise_for(1.0, 0.05, plan) < 1e-2 * noise_for(1.0, 0.05, replace(plan, cohort=1000))


def test_the_presets_of_pfedmoap() -> None:
    """Ten uploads of every client at delta 0.05: the noise is about the size of the bound."""
    found = {}
    for name, preset in PRIVACY_PRESETS.items():
        plan = Plan(preset["noise_at"], 10)
        found[name] = noise_for(preset["target_epsilon"], preset["delta"], plan)
        assert gaussian_delta(found[name] / 2 / math.sqrt(10), preset["target_epsilon"]) == pytest.approx(
            0.05, rel=1e-6
        )
    assert found == {"pfedmoap-25": pytest.approx(1.1029, abs=1e-4), "pfedmoap-50": pytest.approx(0.7372, abs=1e-4)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"releases": -1}, r"plan\.releases must be at least 0, got -1"),
        ({"surveys": -1}, r"plan\.surveys must be at least 0"),
        ({"cohort": 0}, r"plan\.cohort must be in \(0, 50\]"),
        ({"cohort": 51}, r"plan\.cohort must be in \(0, 50\]"),
        ({"cohort": 2.5}, r"plan\.cohort must be a whole number"),
    ],
)
def test_impossible_plans(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        everybody(3, **values)


def test_impossible_numbers() -> None:
    for noise in (-1.0, math.nan):
        with pytest.raises(ConfigError, match=r"privacy\.noise must be at least 0"):
            epsilon(noise, 1e-5, everybody(1))
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match=r"privacy\.delta must be in \(0, 1\)"):
            epsilon(1.0, delta, everybody(1))
        with pytest.raises(ConfigError, match=r"privacy\.delta must be in \(0, 1\)"):
            noise_for(1.0, delta, everybody(1))
    with pytest.raises(ConfigError, match=r"privacy\.target_epsilon must be positive"):
        noise_for(0.0, 1e-5, everybody(1))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedprompt\[dp\]'"):
        epsilon(1.2345, 1e-5, everybody(11))


def test_neither_torch_nor_the_library_is_loaded_by_the_module() -> None:
    code = "import sys, fedprompt.privacy.accounting; print({'torch', 'scipy', 'dp_accounting'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# -- discrete noise ---------------------------------------------------------------------------------------------------


def discrete(sigma: float, shift: int = 0) -> np.ndarray:
    """P(x - shift) for x in -60 sigma .. 60 sigma."""
    reach = math.ceil(60 * max(sigma, 1))
    x = np.arange(-reach, reach + 1, dtype=np.float64)
    return np.exp(-((x - shift) ** 2) / (2 * sigma**2)) / np.exp(-(x**2) / (2 * sigma**2)).sum()


@pytest.mark.parametrize("sigma", [0.4, 0.7, 1.0, 2.5, 9.0, 40.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("order", [1.25, 2.0, 8.0, 32.0])
def test_renyi_divergences_of_discrete_noise_are_no_larger(sigma: float, shift: int, order: float) -> None:
    one, other = np.log(np.maximum(discrete(sigma, shift), 1e-300)), np.log(np.maximum(discrete(sigma), 1e-300))
    inside = (one > -600) & (other > -600)
    terms = (order * one + (1 - order) * other)[inside]
    divergence = (terms.max() + math.log(np.exp(terms - terms.max()).sum())) / (order - 1)
    assert divergence <= order * shift**2 / (2 * sigma**2) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0, 64.0])
def test_rounded_and_discrete_noise_are_as_close_as_stated(sigma: float) -> None:
    reach = math.ceil(13 * sigma)
    with localcontext(prec=60):
        step, width = Decimal(1) / 400, Decimal(sigma)
        found = []
        for x in range(0, reach + 1, max(1, reach // 12)):  # the integral by Simpson's rule
            points = [Decimal(-1) / 2 + step * place for place in range(401)]
            values = [(-(2 * x * t + t * t) / (2 * width * width)).exp() for t in points]
            found.append(step / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])))
        norm = sum((-(Decimal(x) ** 2) / (2 * width * width)).exp() for x in range(-30 * reach, 30 * reach + 1))
        off = norm / (width * Decimal(2 * math.pi).sqrt())
    worst = max(abs(math.log(float(ratio * off))) for ratio in found)
    assert worst <= 7.2 / sigma**2


@pytest.mark.parametrize("rounds", [1, 10])
@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0])
def test_figures_of_the_library_for_discrete_noise_come_to_ours_on_finer_grids(noise: float, rounds: int) -> None:
    from dp_accounting.pld import privacy_loss_distribution

    ours, found = epsilon(noise, 1e-5, everybody(rounds)), []
    for steps in (1, 64):
        each = privacy_loss_distribution.from_discrete_gaussian_mechanism(noise * steps, steps, use_connect_dots=True)
        found.append(each.self_compose(rounds).get_epsilon_for_delta(1e-5))
        assert found[-1] <= ours + 15 * rounds / (noise * steps) ** 2 + 2e-4 * ours
    assert found[1] == pytest.approx(ours, rel=5e-5)
    assert noise > 0.7 or rounds > 1 or found[0] > ours + 0.3, "a coarse grid is another mechanism"
