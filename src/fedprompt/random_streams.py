"""Random streams keyed by what they are for, never by the order in which things happen to run.

A run can therefore be resumed, reordered or spread over processes and still draw the same numbers: there is no generator state to save.

A stream is SHAKE-128 (FIPS 202) in counter mode: the n-th call hashes the stream's key and n, and is as long as wanted. Keys
are SHA-256 of (seed, round, client, purpose), which has no two spellings. Among N keys some two are the same with
probability less than N^2 / 2^257: for a thousand million keys, 10^-59.

Numbers are made from the words with whole numbers and with operations that IEEE 754 rounds in one way only (+ - * / and
the square root), so they are the same on every machine and with every version of torch and numpy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SERVER = -1  # the client number of draws that belong to no client
EDITION = 2  # of the streams, noted in run files: another edition draws other numbers (1 was torch's generator)

Numbers = NDArray[np.float64]
LOG_2 = 0.6931471805599453
LOGARITHM = [2 / n for n in range(1, 25, 2)]  # log((1 + s) / (1 - s)) = sum of 2 s^n / n over odd n; here s^2 < 0.04
SINE = [(-1) ** (n // 2) / math.factorial(n) for n in range(1, 20, 2)]  # Taylor, up to pi / 4
COSINE = [(-1) ** (n // 2) / math.factorial(n) for n in range(0, 20, 2)]


class Stream:
    """Random numbers that follow from a key and from nothing else. Results are on the CPU."""

    __slots__ = ("_calls", "_key")

    def __init__(self, key: bytes) -> None:
        """`key` has 32 bytes."""
        self._key, self._calls = key, 0

    def words(self, count: int) -> NDArray[np.uint64]:
        """Words of 64 random bits."""
        return np.frombuffer(self._bytes(8 * count), "<u8").astype(np.uint64, copy=False)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in [0, 1), in all steps that the dtype has between a half and 1."""
        count = math.prod(shape)
        if dtype == torch.float64:
            drawn = _fraction(self.words(count), 53)
        else:  # 24 bits of 32
            drawn = (np.frombuffer(self._bytes(4 * count), "<u4") >> np.uint32(8)).astype(np.float64) * 2.0**-24
        return torch.from_numpy(drawn).reshape(shape).to(dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Of mean 0 and variance 1. In double precision every number has a word of its own, else two share one."""
        count = math.prod(shape)
        pairs = (count + 1) // 2
        if dtype == torch.float64:
            words = self.words(2 * pairs)
            drawn = normals(words[:pairs], words[pairs:], bits=53)
        else:
            words = self.words(pairs)
            drawn = normals(words, words << np.uint64(32), bits=32)
        return torch.from_numpy(drawn[:count]).reshape(shape).to(dtype)

    def permutation(self, count: int) -> Tensor:
        """The numbers 0 to count - 1 in random order: each stands in the low bits of a random word, and the words are sorted."""
        return permutations([self], count)[0]

    def integer(self, below: int) -> int:
        """One of 0 to below - 1, for `below` up to 2^64; words of the last, incomplete cycle are drawn again."""
        end = 2**64 - 2**64 % below
        while True:
            word = int(self.words(1)[0])
            if word < end:
                return word % below

    def _bytes(self, count: int) -> bytes:
        block = self._key + self._calls.to_bytes(8, "little")
        self._calls += 1
        return hashlib.shake_128(block).digest(count)


def stream(seed: int, round: int, client: int, purpose: str) -> Stream:
    """A fresh stream for (seed, round, client, purpose); two different keys give independent streams."""
    return Stream(hashlib.sha256(f"{seed}/{round}/{client}/{purpose}".encode()).digest())


def permutations(streams: Sequence[Stream], count: int) -> Tensor:
    """One permutation of each stream, (streams, count): the numbers that each would draw alone, at once."""
    words = np.frombuffer(b"".join(each._bytes(8 * count) for each in streams), "<u8").reshape(len(streams), count)
    low = np.uint64((1 << max(count - 1, 0).bit_length()) - 1)
    mixed = words & ~low | np.arange(count, dtype=np.uint64)
    mixed.sort(axis=1)
    return torch.from_numpy((mixed & low).view(np.int64))


def normals(first: NDArray[np.uint64], second: NDArray[np.uint64], bits: int) -> Numbers:
    """Two normal numbers of each pair of words (Box and Muller 1958): the first bits of one give the length of a vector
    in the plane, the first two of the other its quarter of the circle and the rest the direction within that."""
    radius = np.sqrt(-2 * _logarithm(_fraction(first, bits) + 2.0**-bits))
    radius *= 1 - 2.0 * (second >> np.uint64(63))
    turned = (second & np.uint64(2**62)).astype(bool)
    angle = (_fraction(second << np.uint64(2), 53) - 0.5) * (math.pi / 2)
    square = angle * angle
    x, y = _polynomial(COSINE, square), _polynomial(SINE, square) * angle
    return np.concatenate([radius * np.where(turned, -y, x), radius * np.where(turned, x, y)])


def _fraction(words: NDArray[np.uint64], bits: int) -> Numbers:
    """The first bits of every word as a number in [0, 1)."""
    return (words >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits


def _logarithm(positive: Numbers) -> Numbers:
    """The natural logarithm: libraries differ in the last bit of theirs."""
    mantissa, exponent = np.frexp(positive)
    low = mantissa < 0.7
    mantissa = np.where(low, 2 * mantissa, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    found: Numbers = (exponent - low) * LOG_2 + _polynomial(LOGARITHM, ratio * ratio) * ratio
    return found


def _polynomial(coefficients: Sequence[float], x: Numbers) -> Numbers:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total *= x
        total += coefficient
    return total
