"""Noise for counts has the law it claims, from whole numbers alone."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest

from fedprompt.privacy.discrete_laplace import _coin_exp, discrete_laplace

pytestmark = pytest.mark.unit

DRAWS = 20_000


@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(1), Fraction(5, 2), Fraction(8)])
def test_the_law_is_that_of_laplace_on_whole_numbers(scale: Fraction) -> None:
    """Every probability within five deviations of what was drawn, and both signs alike."""
    found = Counter(discrete_laplace(scale) for _ in range(DRAWS))
    share = math.exp(-1 / float(scale))
    for value in range(-6, 7):
        expected = (1 - share) / (1 + share) * share ** abs(value)
        deviation = math.sqrt(expected * (1 - expected) / DRAWS)
        assert found[value] / DRAWS == pytest.approx(expected, abs=5 * deviation + 1e-9)


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(7, 2)])
def test_a_coin_falls_as_often_as_it_should(gamma: Fraction) -> None:
    expected = math.exp(-float(gamma))
    heads = sum(_coin_exp(gamma) for _ in range(DRAWS)) / DRAWS
    assert heads == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / DRAWS) + 1e-9)


def test_a_scale_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="scale must be positive"):
        discrete_laplace(Fraction(0))
