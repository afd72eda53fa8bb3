"""Intervals, signs and ranks against scipy, closed forms and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedprompt.metrics.significance import (
    LEAST_FREEDOM,
    Stratum,
    bootstrap,
    chi2_tail,
    enough,
    mean_interval,
    rank_over_tasks,
    sign_test,
    studentised_range,
    t_quantile,
)

pytestmark = pytest.mark.unit


def simulated_coverage(seeds: int, clients: int, images: int, spread: float) -> float:
    """How many of 1,000 intervals hold the true mean difference of two methods whose answers on an image go together."""
    generator = np.random.default_rng(7)

    def chances(size: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        first = generator.beta(6, 3, size)
        return first, np.clip(first + 0.05 + spread * generator.standard_normal(size), 0, 1)

    one, other = chances((400_000,))
    truth = float((other - one).mean())
    first, second = chances((1000, seeds, clients, 1))
    luck = generator.random((1000, seeds, clients, images))  # an image that is easy for one is easy for the other
    differences = ((luck < second).astype(float) - (luck < first)).mean(-1)
    found = 0
    for experiment in differences:
        interval = bootstrap([Stratum(each, 1 / seeds) for each in experiment], generator, draws=500)
        found += interval.low <= truth <= interval.high
    return found / 1000


def test_intervals_over_clients_within_seeds_cover_the_truth() -> None:
    assert 0.93 <= simulated_coverage(3, 6, 20, 0.1) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "clients"), [(1, 6), (2, 3), (3, 4), (3, 10), (5, 20), (1, 100)])
@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_intervals_cover_the_truth_with_few_and_with_many_clients(seeds: int, clients: int, spread: float) -> None:
    assert 0.925 <= simulated_coverage(seeds, clients, 50, spread) <= 0.975


def test_an_interval_of_many_normal_units_is_that_of_the_t_test() -> None:
    values = np.random.default_rng(1).normal(0.3, 1, 400)
    found = bootstrap([Stratum(values, 1.0)], np.random.default_rng(2), draws=20_000)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found.estimate == pytest.approx(values.mean())
    assert (found.low, found.high) == (pytest.approx(low, abs=0.005), pytest.approx(high, abs=0.005))


def test_the_mean_of_very_many_units_is_drawn_from_its_limit() -> None:
    values = np.random.default_rng(1).normal(0, 1, 50_000)
    found = bootstrap([Stratum(values, 1.0)], np.random.default_rng(2))
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(50_000), rel=0.06)


@pytest.mark.parametrize(("mean", "word"), [(0.5, "ahead"), (0.0, "level"), (-0.5, "behind")])
def test_the_word_says_on_which_side_of_zero_the_interval_is(mean: float, word: str) -> None:
    values = mean + np.linspace(-0.2, 0.2, 9)
    assert bootstrap([Stratum(values, 1.0)], np.random.default_rng(0)).verdict == word


@pytest.mark.parametrize(
    ("sizes", "fine"),
    [([5], True), ([4], False), ([3, 3], True), ([1, 9], False), ([2] * LEAST_FREEDOM, True), ([], 0)],
)
def test_too_few_units_have_no_interval(sizes: list[int], fine: bool) -> None:
    assert enough([Stratum(np.zeros(size), 1.0) for size in sizes]) == fine


@pytest.mark.parametrize(("ahead", "behind"), [(3, 0), (5, 0), (2, 7), (4, 4), (0, 0), (1, 0)])
def test_the_sign_test_is_exact(ahead: int, behind: int) -> None:
    expected = stats.binomtest(ahead, ahead + behind).pvalue if ahead + behind else 1.0
    assert sign_test(ahead, behind) == pytest.approx(expected)


@pytest.mark.parametrize("degrees", [1, 1.5, 2, 3.7, 4, 10, 200, 201, 1000, math.inf])
def test_the_quantile_of_t_is_that_of_scipy(degrees: float) -> None:
    expected = stats.norm.ppf(0.975) if math.isinf(degrees) else stats.t.ppf(0.975, degrees)
    assert t_quantile(degrees) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("values", [[0.02, 0.05], [0.1, -0.2, 0.05, 0.0], [0.31, 0.3, 0.29, 0.33, 0.35]])
def test_the_interval_of_a_mean_is_that_of_scipy(values: list[float]) -> None:
    found = mean_interval(values)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-5)
    assert found.estimate == pytest.approx(np.mean(values))


def test_one_value_has_no_interval() -> None:
    assert mean_interval([0.3]) is None


@pytest.mark.parametrize("degrees", [1, 2, 3, 6, 9])
def test_the_tail_of_chi2_is_that_of_scipy(degrees: int) -> None:
    assert [chi2_tail(value, degrees) for value in (0.0, 0.7, 5.0, 30.0)] == pytest.approx(
        stats.chi2.sf([0.0, 0.7, 5.0, 30.0], degrees)
    )


@pytest.mark.parametrize(("methods", "quantile"), [(2, 2.772), (3, 3.314), (5, 3.858), (10, 4.474)])
def test_the_studentised_range_is_that_of_the_tables(methods: int, quantile: float) -> None:
    assert studentised_range(methods) == pytest.approx(quantile, abs=5e-4)


def test_ranks_over_tasks_are_those_of_friedman_with_ties() -> None:
    scores = np.random.default_rng(0).integers(0, 5, (7, 4)).astype(float)
    found = rank_over_tasks(scores)
    assert found.p == pytest.approx(stats.friedmanchisquare(*scores.T).pvalue)
    assert found.ranks == pytest.approx(stats.rankdata(-scores, axis=1).mean(0))


def test_the_critical_difference_is_that_of_demsar() -> None:
    """His example: four classifiers on fourteen data sets have a critical difference of 1.25."""
    assert rank_over_tasks(np.random.default_rng(0).random((14, 4))).critical == pytest.approx(1.25, abs=0.005)


def test_methods_that_are_equal_everywhere_share_one_rank() -> None:
    found = rank_over_tasks(np.ones((5, 3)))
    assert (found.ranks, found.p) == ((2.0, 2.0, 2.0), 1.0)
