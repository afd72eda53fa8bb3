"""Whole numbers with Gaussian noise: P(x) proportional to f(x) = exp(-x^2 / (2 sigma^2)) for x in Z.

Noise in floating point has low bits that can reveal a true value (Mironov 2012). Noise on whole numbers has none, and for
differential privacy it is as good as the continuous one (Canonne, Kamath and Steinke 2020; see `privacy.accounting`).

They sample by rejection from a discrete Laplace distribution, number by number. Here the proposal is a step function just
above f, so that about 97 of 100 proposals are accepted and all steps are array operations:

    |x| = k w + u    with w a power of two of about sigma / 16 to sigma / 32 (1 for a small sigma), u uniform in 0..w-1,
    k               with probability a_k / 2^16 for whole numbers a_k > s f(k w), read from a table of 2^16 entries,
    sign            one bit; a negative zero is rejected,
    x is accepted   with probability s f(x) / a_k, which is below 1 because f falls.

What is exact. Blocks, offsets and signs are random bits without any arithmetic. A number is accepted if V < s f(x) / a_k for a
real number V, uniform in [0, 1), of which 64 bits are drawn. Floating point decides if the two sides differ by more than
`MARGIN`, which is a thousand times its error. The other cases, one in 2^39, are decided in decimal arithmetic with as many
digits and further bits of V as needed. So the result is exactly a discrete Gaussian, except for numbers beyond
13 sigma, which are never drawn: their probability is below 2^-120. The result is also the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedprompt.errors import ConfigError, broken

REACH = 13  # standard deviations
INDEX_BITS = 16  # of a word; they choose the block
FEWEST = 16  # blocks within a standard deviation, if it has at least as many numbers
LARGEST = 2.0**48  # sigma, so that every number is a float64 and fits into a word with its block and sign
MARGIN = 2.0**-40
CHUNK = 2**13  # numbers per array, so that arrays stay in the processor's cache
ONE = np.float64(1).view(np.uint64)  # the bits of 1.0; with 52 random bits they form a number in [1, 2)


class Words(Protocol):
    """A source of random bits: a key stream or, in a simulation, a stream derived from the seed."""

    def words(self, count: int) -> NDArray[np.uint64]: ...


def discrete_gaussian(count: int, sigma: float, source: Words) -> NDArray[np.int64]:
    """`count` independent draws."""
    if not 0 < sigma <= LARGEST:
        raise ConfigError(broken("sigma of discrete noise", f"be in (0, {LARGEST:g}]", sigma))
    stairs, found, done = _staircase(sigma), np.empty(count, np.int64), 0
    while done < count:
        taken = stairs.taken(min(int(1.05 * (count - done)) + 16, CHUNK), source)[: count - done]
        found[done : done + len(taken)] = taken
        done += len(taken)
    return found


@dataclass(frozen=True, eq=False)
class _Staircase:
    """The proposal for one sigma."""

    sigma: float
    width_bits: int
    """w = 2^width_bits."""
    scale: int
    """s."""
    heights: NDArray[np.int64]
    """a_k."""
    blocks: NDArray[np.int16]
    """k for every index; indices without a block get the number of blocks."""
    ratios: NDArray[np.float64]
    """s / a_k, and 0 for indices without a block."""

    def taken(self, count: int, source: Words) -> NDArray[np.int64]:
        """The accepted ones of `count` proposals."""
        words = source.words(2 * count)
        proposed, lots = words[:count], words[count:]
        blocks = self.blocks.take((proposed & np.uint64(2**INDEX_BITS - 1)).view(np.int64))
        rest = (proposed >> np.uint64(INDEX_BITS)).view(np.int64)
        sizes = rest >> 1
        sizes &= 2**self.width_bits - 1
        sizes += blocks.astype(np.int64) << self.width_bits
        lead = sizes.astype(np.float64)  # f(x) s / a_k - V from here on
        lead *= lead
        lead *= -0.5 / self.sigma**2
        np.exp(lead, out=lead)
        lead *= self.ratios.take(blocks)
        lead += 1
        lead -= (lots >> np.uint64(12) | ONE).view(np.float64)
        taken = lead > 0
        for place in np.flatnonzero(np.abs(lead, out=lead) <= MARGIN):
            taken[place] = self.exactly_taken(int(sizes[place]), int(blocks[place]), int(lots[place]), source)
        rest &= 1
        if not sizes.all():
            taken &= (sizes > 0) | (rest == 0)  # no negative zero
        rest *= -2
        rest += 1  # the sign
        sizes *= rest
        return sizes[taken]

    def exactly_taken(self, size: int, block: int, lot: int, source: Words) -> bool:
        """Whether V < s f(x) / a_k, where V begins with the 64 bits of `lot`. False for a number without a block."""
        if block == len(self.heights):
            return False
        bits = 64
        while True:
            with localcontext(prec=bits // 3 + 20) as context:  # 3 bits are less than one decimal digit
                exponent = -(Decimal(size) ** 2) / (2 * Decimal(self.sigma) ** 2)
                chance = exponent.exp() * self.scale / int(self.heights[block]) * 2**bits
                slack = Decimal(10) ** (15 - context.prec) * 2**bits
                if lot + 1 <= chance - slack:
                    return True
                if lot >= chance + slack:
                    return False
            lot, bits = (lot << 64) + int(source.words(1)[0]), bits + 64


@lru_cache(maxsize=64)
def _staircase(sigma: float) -> _Staircase:
    width_bits = max(math.frexp(sigma / FEWEST)[1] - 1, 0)
    count = math.ceil(REACH * sigma / 2**width_bits) + 1
    with localcontext(prec=40):
        unit = Decimal(2) ** width_bits / Decimal(sigma)
        values = [(-((k * unit) ** 2) / 2).exp() for k in range(count)]
        scale = int((2**INDEX_BITS - count) / sum(values))
        heights = np.array([int(scale * value) + 1 for value in values], np.int64)
    blocks = np.full(2**INDEX_BITS, count, np.int16)
    blocks[: heights.sum()] = np.repeat(np.arange(count), heights)
    return _Staircase(sigma, width_bits, scale, heights, blocks, np.append(scale / heights, 0.0))
