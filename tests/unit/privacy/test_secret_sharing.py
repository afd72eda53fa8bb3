"""Enough shares give the secret, and one less give nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprompt.errors import ContractError
from fedprompt.privacy.secure_sum import secret_sharing

pytestmark = pytest.mark.unit


@given(st.integers(0, 2**256 - 1), st.integers(1, 8), st.data())
def test_any_threshold_of_shares_gives_the_secret_and_one_less_fits_any_secret(
    secret: int, threshold: int, data: st.DataObject
) -> None:
    points = data.draw(st.lists(st.integers(1, 10**6), min_size=threshold, max_size=10, unique=True))
    shares = secret_sharing.split(secret, threshold, points)
    chosen = data.draw(st.permutations(points))[:threshold]
    assert secret_sharing.recover({point: shares[point] for point in chosen}) == secret
    other = data.draw(st.integers(0, 2**256 - 1))
    known = {point: shares[point] for point in chosen[1:]}
    # the share of the missing point that would make the secret another one: there is exactly one, since it enters linearly
    base = secret_sharing.recover({**known, chosen[0]: 0})
    slope = (secret_sharing.recover({**known, chosen[0]: 1}) - base) % secret_sharing.PRIME
    assert slope
    fitting = (other - base) * pow(slope, -1, secret_sharing.PRIME) % secret_sharing.PRIME
    assert secret_sharing.recover({**known, chosen[0]: fitting}) == other


def test_fewer_shares_than_the_threshold_are_distributed_alike_for_all_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a field of seven, over every draw of the coefficients: each pair of two shares of three comes exactly once."""
    monkeypatch.setattr(secret_sharing, "PRIME", 7)
    for secret in range(7):
        pairs = []
        for drawn in itertools.product(range(7), repeat=2):
            coefficients = iter(drawn)
            monkeypatch.setattr(secret_sharing.secrets, "randbelow", lambda below, rest=coefficients: next(rest))
            shares = secret_sharing.split(secret, 3, [2, 5, 6])
            assert all(shares[x] == (secret + drawn[0] * x + drawn[1] * x * x) % 7 for x in shares)
            pairs.append((shares[2], shares[6]))
        assert len(set(pairs)) == 49


@pytest.mark.parametrize(
    ("secret", "threshold", "points", "message"),
    [
        (secret_sharing.PRIME, 2, [1, 2], "number of the field"),
        (1, 3, [1, 2], "threshold must be in 1..2"),
        (1, 0, [1, 2], "threshold must be in 1..2"),
        (1, 2, [1, 1], "distinct and not 0"),
        (1, 2, [0, 1], "distinct and not 0"),
    ],
)
def test_sharing_refuses_what_cannot_be_shared(secret: int, threshold: int, points: list[int], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        secret_sharing.split(secret, threshold, points)
    with pytest.raises(ContractError, match="at least one"):
        secret_sharing.recover({})
