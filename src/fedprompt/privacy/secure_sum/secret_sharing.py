"""Shamir's secret sharing: any `threshold` of the shares give the secret, fewer reveal nothing about it.

A secret s is the value at 0 of a polynomial over a prime field whose other coefficients are drawn at random,

    f(x) = s + a_1 x + ... + a_{t-1} x^{t-1}   (mod p),

and the share of point x is f(x). Through any t-1 shares and any value at 0 goes exactly one such polynomial.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from fedprompt.errors import ContractError, broken

PRIME = 2**521 - 1  # p, larger than any 256-bit secret
SHARE_BYTES = 66  # enough for any number below p


def split(secret: int, threshold: int, points: Collection[int]) -> dict[int, int]:
    """The share of every point."""
    if not 0 <= secret < PRIME:
        raise ContractError("secret must be a number of the field, got one outside")
    if not 1 <= threshold <= len(points):
        raise ContractError(broken("threshold", f"be in 1..{len(points)}, the number of shares", threshold))
    if len({point % PRIME for point in points} - {0}) != len(points):
        raise ContractError(broken("points", "be distinct and not 0, where the secret is", sorted(points)))
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _value(coefficients, point) for point in points}


def recover(shares: Mapping[int, int]) -> int:
    """The secret, by Lagrange's formula at 0: the sum over x of f(x) times the product over y != x of y / (y - x)."""
    if not shares:
        raise ContractError("shares must be at least one, got none")
    secret = 0
    for point, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        secret = (secret + share * above * pow(below, -1, PRIME)) % PRIME
    return secret


def _value(coefficients: list[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value
