"""Risk, coverage and the area under their curve, by hand and against scikit-learn's definition of the AUROC."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedprompt.metrics.selective import Selective

pytestmark = pytest.mark.unit


def test_risks_are_those_counted_by_hand() -> None:
    found = Selective.of(np.array([0.3, 0.1, 0.4, 0.2]), np.array([True, False, True, False]))
    assert found.risks.tolist() == pytest.approx([0, 0, 1 / 3, 2 / 4])
    assert found.aurc == pytest.approx((1 / 3 + 1 / 2) / 4)
    assert found.auroc == 1.0
    assert found.accuracy_at(0.5) == 1.0
    assert found.accuracy_at(0.75) == pytest.approx(2 / 3)
    assert found.accuracy_at(1.0) == 0.5


def test_images_of_equal_uncertainty_count_as_the_mean_over_all_orders() -> None:
    wrong = np.array([True, False, False, True])
    found = Selective.of(np.array([0.5, 0.5, 0.5, 0.9]), wrong)
    orders = [[True, False, False], [False, True, False], [False, False, True]]
    naive = np.mean([np.cumsum([*order, True]) / np.arange(1, 5) for order in orders], axis=0)
    assert found.risks.tolist() == pytest.approx(naive.tolist())


def test_the_auroc_is_the_statistic_of_mann_and_whitney() -> None:
    generator = np.random.default_rng(0)
    uncertainty, wrong = generator.integers(0, 9, 200) / 9, generator.random(200) < 0.3
    u = stats.mannwhitneyu(uncertainty[wrong], uncertainty[~wrong]).statistic
    assert Selective.of(uncertainty, wrong).auroc == pytest.approx(u / (wrong.sum() * (~wrong).sum()))


@pytest.mark.parametrize("answer", [True, False])
def test_without_both_kinds_of_answers_there_is_no_auroc(answer: bool) -> None:
    found = Selective.of(np.arange(3.0), np.full(3, answer))
    assert math.isnan(found.auroc)
    assert found.aurc == float(answer)


def test_a_score_that_knows_nothing_has_the_error_rate_as_its_risk() -> None:
    wrong = np.array([True, False, False, False])
    assert Selective.of(np.zeros(4), wrong).risks.tolist() == pytest.approx([0.25] * 4)


def test_curves_of_other_lengths_have_the_same_coverages() -> None:
    long = Selective.of(np.arange(400.0), np.arange(400) >= 200)
    assert len(long.curve()) == 100
    assert long.curve()[49] == 0.0
    assert long.curve()[-1] == pytest.approx(0.5)
