"""Noise for counts: whole numbers x with probability proportional to exp(-|x| / scale), drawn without any rounding.

Only whole numbers are used, so there are no gaps of floating point that could reveal the noise. Every random bit comes from
the operating system. Free of torch.
"""

from __future__ import annotations

import secrets
from fractions import Fraction


def discrete_laplace(scale: Fraction) -> int:
    """One draw. For a count that one image changes by at most s, it gives epsilon = s / scale."""
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    return _successes(1 / scale) - _successes(1 / scale)


def _successes(gamma: Fraction) -> int:
    """The number of heads before the first tail, for a coin with P(heads) = exp(-gamma)."""
    count = 0
    while _coin_exp(gamma):
        count += 1
    return count


def _coin_exp(gamma: Fraction) -> bool:
    """True with probability exp(-gamma): one coin for each whole unit, and one for the rest."""
    whole, rest = divmod(gamma, 1)
    return all(_coin_exp_small(Fraction(1)) for _ in range(int(whole))) and _coin_exp_small(Fraction(rest))


def _coin_exp_small(gamma: Fraction) -> bool:
    """The same for gamma up to 1, by its series 1 - g + g^2/2 - ...: coins of g/1, g/2, g/3, ... until one fails.

    The k-th is the first to fail with probability g^(k-1)/(k-1)! - g^k/k!, and odd k add up to exp(-g).
    """
    k = 1
    while _coin(gamma / k):
        k += 1
    return k % 2 == 1


def _coin(share: Fraction) -> bool:
    return secrets.randbelow(share.denominator) < share.numerator
