"""Noise on whole numbers: its distribution is the one it is named after, its decisions are exact, its bits come from a cipher."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]
from support import seeded

from fedprompt.errors import ConfigError
from fedprompt.privacy import discrete_gaussian as module
from fedprompt.privacy.discrete_gaussian import discrete_gaussian
from fedprompt.privacy.keystream import Keystream, derived_keystream, new_keystream

pytestmark = pytest.mark.unit

KEY = bytes(range(32))


def keyed(text: str) -> Keystream:
    return derived_keystream(7, text.encode())


def test_the_key_stream_is_that_of_rfc_8439() -> None:
    """Appendix A.1, vectors 1 to 3: key 0, block counters 0 and 1, and the key that ends in 1 at counter 1."""
    zero = Keystream(bytes(32)).words(16).astype("<u8").tobytes()
    assert zero[:64].hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert zero[64:].hex() == (
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    last = Keystream(bytes(31) + b"\1").words(16).astype("<u8").tobytes()
    assert last[64:].hex() == (
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"
    )


def test_a_key_stream_gives_each_word_once() -> None:
    whole, parts = Keystream(KEY).words(24), Keystream(KEY)
    assert np.concatenate([parts.words(3), parts.words(0), parts.words(21)]).tolist() == whole.tolist()
    assert len(set(whole.tolist())) == 24


def test_a_key_gives_fixed_numbers() -> None:
    """As they follow from the definition, number by number in sixty decimals."""
    assert discrete_gaussian(6, 5.0, Keystream(KEY)).tolist() == KNOWN[5.0]
    assert discrete_gaussian(4, 1.5 * 2**40, Keystream(KEY)).tolist() == KNOWN[1.5 * 2**40]


KNOWN = {
    5.0: [-13, -5, 1, -6, 0, -3],
    1.5 * 2**40: [-4590832238229, -1878752246657, 435660142572, -2140863735358],
}


def probabilities(sigma: float, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    everything = np.arange(-40 * math.ceil(sigma), 40 * math.ceil(sigma) + 1)
    return np.exp(-(numbers**2) / (2 * sigma**2)) / np.exp(-(everything**2) / (2 * sigma**2)).sum()


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0, 1.7, 4.0, 15.9, 16.0, 33.3, 70.0])
def test_small_noise_has_the_probabilities_of_a_discrete_gaussian(sigma: float) -> None:
    count = 400_000
    drawn = discrete_gaussian(count, sigma, keyed(f"pmf {sigma}"))
    near = np.arange(-10 * math.ceil(sigma), 10 * math.ceil(sigma) + 1)
    expected = count * probabilities(sigma, near)
    seen = np.array([(drawn == number).sum() for number in near[expected >= 10]])
    inside = expected[expected >= 10]
    rest = count - inside.sum()
    observed, wanted = (seen, inside) if rest < 1 else (np.append(seen, count - seen.sum()), np.append(inside, rest))
    assert stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue > 1e-4


@pytest.mark.parametrize("sigma", [1000.7, 2.0**20, 1.3 * 2**40, 1.99 * 2**40, 2.0**48])
def test_large_noise_is_normal(sigma: float) -> None:
    count = 400_000
    drawn = discrete_gaussian(count, sigma, keyed(f"normal {sigma}"))
    scaled = drawn / sigma
    assert stats.kstest(scaled, "norm").pvalue > 1e-4
    assert abs(scaled.mean()) < 4.5 / math.sqrt(count)
    assert abs(scaled.var() - 1) < 4.5 * math.sqrt(2 / count)
    assert abs((scaled**4).mean() - 3) < 4.5 * math.sqrt(96 / count)
    bits = 2 ** module._staircase(sigma).width_bits
    if bits > 2**16:
        low = drawn % 2**16 / 2**16  # the last digits say nothing
        assert stats.kstest(low, "uniform").pvalue > 1e-4


@given(st.floats(0.05, 2.0**48), st.integers(0, 10**6))
@settings(max_examples=40)
def test_any_noise_has_its_variance(sigma: float, number: int) -> None:
    drawn = discrete_gaussian(20_000, sigma, keyed(f"variance {number}")).astype(np.float64)
    near = np.arange(-60, 61)
    true = float((probabilities(sigma, near) * near**2).sum()) if sigma < 2 else sigma**2
    spread = math.sqrt(true**2 * 2 + true) if sigma < 2 else true * math.sqrt(2)
    assert abs((drawn**2).mean() - true) < 7 * spread / math.sqrt(20_000) + 1e-3


def test_numbers_calls_and_keys_are_independent() -> None:
    sigma, length = 1.3 * 2**40, 20_000
    one = keyed("calls")
    calls = [discrete_gaussian(length, sigma, one) for _ in range(12)]
    keys = [discrete_gaussian(length, sigma, new_keystream()) for _ in range(12)]
    rows = np.stack([*calls, *keys]) / sigma
    bound = 5.5 / math.sqrt(length)
    for lag in (0, 1, 2, 7):
        correlations = np.corrcoef(rows[:, : length - lag or None], rows[:, lag:])[:24, 24:]
        if lag == 0:
            np.fill_diagonal(correlations, 0)
        assert np.abs(correlations).max() < bound
        squares = np.corrcoef(rows[:, : length - lag or None] ** 2, rows[:, lag:] ** 2)[:24, 24:]
        np.fill_diagonal(squares, 0)
        assert np.abs(squares).max() < bound
    assert len(np.unique(np.concatenate(keys))) > 12 * length - 3


@pytest.mark.parametrize("sigma", [0.7, 4.0, 33.3, 1000.7, 1.3 * 2**40, 2.0**48])
def test_floating_point_decides_as_exact_arithmetic_does(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = discrete_gaussian(3000, sigma, keyed("exact"))
    monkeypatch.setattr(module, "MARGIN", 2.0)  # nothing is left to floating point
    exact = discrete_gaussian(3000, sigma, keyed("exact"))
    assert quick.tolist() == exact.tolist()


class Listed:
    """Words as they are given."""

    def __init__(self, *words: int) -> None:
        self.given = list(words)

    def words(self, count: int) -> NDArray[np.uint64]:
        found, self.given = self.given[:count], self.given[count:]
        return np.array(found, np.uint64)


def test_a_tie_in_all_bits_is_decided_by_further_ones() -> None:
    """V begins as the chance does, for 64 and for 128 bits; what comes next decides."""
    stairs = module._staircase(1.3 * 2**40)
    size, block = (20 << stairs.width_bits) + 12345, 20
    with localcontext(prec=200):
        chance = (-(Decimal(size) ** 2) / (2 * Decimal(stairs.sigma) ** 2)).exp() * stairs.scale
        digits = int(chance / int(stairs.heights[block]) * 2**192)
    first, second, third = (digits >> shift & (2**64 - 1) for shift in (128, 64, 0))
    for words, taken in (
        ((first - 1,), True),
        ((first + 1,), False),
        ((first, second - 1), True),
        ((first, second + 1), False),
        ((first, second, third - 2**20), True),
        ((first, second, third + 2**20), False),
    ):
        source = Listed(*words[1:])
        assert stairs.exactly_taken(size, block, words[0], source) is taken
        assert source.given == []


def test_the_staircase_is_above_the_curve_and_reaches_far_enough() -> None:
    for sigma in (0.2, 1.0, 15.99, 16.0, 31.7, 1.3 * 2**40, 2.0**48):
        stairs = module._staircase(sigma)
        width = 2**stairs.width_bits
        assert width == 1 or 16 <= sigma / width < 32
        assert stairs.heights.sum() <= 2**16
        with localcontext(prec=60):
            for block, height in enumerate(stairs.heights.tolist()):
                value = (-(Decimal(block * width) ** 2) / (2 * Decimal(sigma) ** 2)).exp()
                assert height > stairs.scale * value
            beyond = Decimal(len(stairs.heights) * width) / Decimal(sigma)
            assert (-(beyond**2) / 2).exp() < Decimal(2) ** -120
        assert np.bincount(stairs.blocks, minlength=len(stairs.heights))[: len(stairs.heights)].tolist() == (
            stairs.heights.tolist()
        )


def test_a_negative_zero_is_thrown_away() -> None:
    """Else zero would be drawn twice as often. An index of 0 is block 0, bit 16 is the sign, a lot of 0 takes all."""
    stairs = module._staircase(1.0)
    assert stairs.taken(2, Listed(0, 1 << 16, 0, 0)).tolist() == [0]
    index = int(stairs.heights[0])  # the first of block 1
    assert stairs.taken(2, Listed(index, index | 1 << 16, 0, 0)).tolist() == [1, -1]


def test_a_stream_of_a_simulation_feeds_the_same_sampler() -> None:
    drawn = discrete_gaussian(1000, 9.0, seeded(3))
    assert drawn.tolist() == discrete_gaussian(1000, 9.0, seeded(3)).tolist()
    assert drawn.tolist() != discrete_gaussian(1000, 9.0, seeded(4)).tolist()


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2.0**49])
def test_noise_that_cannot_be_drawn_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match=r"sigma of discrete noise must be in \(0, 2\.8"):
        discrete_gaussian(1, sigma, seeded())
    assert discrete_gaussian(0, 1.0, seeded()).tolist() == []


def test_rounding_of_the_continuous_gaussian_is_close() -> None:
    """What lets the figures of the continuous mechanism stand: the distance falls with the square of sigma."""
    for sigma in (1.0, 2.0, 5.0, 20.0, 100.0):
        numbers = np.arange(-12 * math.ceil(sigma), 12 * math.ceil(sigma) + 1)
        rounded = stats.norm.cdf((numbers + 0.5) / sigma) - stats.norm.cdf((numbers - 0.5) / sigma)
        distance = np.abs(rounded - probabilities(sigma, numbers)).sum() / 2
        assert distance <= 0.03 / sigma**2
