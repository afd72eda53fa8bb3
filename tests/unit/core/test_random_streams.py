"""Random streams depend on what they are for and on nothing else, and no two of them are the same."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from fedprompt import random_streams
from fedprompt.random_streams import SERVER, Stream, permutations, stream

pytestmark = pytest.mark.unit


def draw(*key: object) -> float:
    return stream(*key).uniform(1, dtype=torch.float64).item()  # type: ignore[arg-type]


def test_the_same_key_gives_the_same_numbers() -> None:
    assert draw(0, 1, 2, "noise") == draw(0, 1, 2, "noise")


def test_every_part_of_the_key_counts() -> None:
    keys = itertools.product((0, 1), (0, 1, 10), (SERVER, 0, 1, 10), ("noise", "batches"))
    drawn = [draw(*key) for key in keys]
    assert len(set(drawn)) == len(drawn)


@given(*2 * [st.tuples(st.integers(), st.integers(0), st.integers(SERVER), st.text(max_size=9))])
def test_two_keys_are_the_same_only_if_they_say_the_same(one: tuple, other: tuple) -> None:
    same = stream(*one).words(4).tolist() == stream(*other).words(4).tolist()
    assert same == (one == other)


def test_no_two_of_many_streams_begin_alike() -> None:
    """Torch keeps 32 bits of a seed: of these many streams it made some 21 pairs that were the same throughout."""
    rounds, clients = range(1, 43), range(10_000)
    begins = Counter(stream(0, round, client, "noise").words(2).tobytes() for round in rounds for client in clients)
    assert max(begins.values()) == 1
    assert len(hashlib.sha256().digest()) == 32  # of the key: N^2 / 2^257 for N keys, 10^-59 for a thousand million
    assert (1e9**2) / 2**257 < 1e-58


def test_the_calls_of_a_stream_are_independent() -> None:
    one = stream(0, 1, 2, "calls")
    drawn = torch.stack([one.normal(10_000, dtype=torch.float64) for _ in range(20)])
    others = torch.stack([stream(0, 1, client, "calls").normal(10_000, dtype=torch.float64) for client in range(3, 23)])
    correlations = torch.corrcoef(torch.cat([drawn, others, drawn.roll(1, 1)])).fill_diagonal_(0)
    assert correlations.abs().max() < 0.055  # 5.5 standard deviations


def test_the_global_generators_are_left_alone() -> None:
    before, numpys = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    stream(0, 0, 0, "x").normal(5)
    assert torch.equal(before, torch.get_rng_state())
    assert all(np.array_equal(a, b) for a, b in zip(numpys, np.random.get_state(), strict=True))  # noqa: NPY002


def test_a_stream_is_the_same_on_every_machine() -> None:
    """Words are those of FIPS 202; numbers were computed from them in fifty decimals, and are off by a last bit at most."""
    made = stream(0, 1, 2, "golden")
    key = hashlib.sha256(b"0/1/2/golden").digest()
    assert made.words(2).tobytes() == hashlib.shake_128(key + bytes(8)).digest(16)
    assert made.words(1).tobytes() == hashlib.shake_128(key + (1).to_bytes(8, "little")).digest(8)
    made = stream(0, 1, 2, "golden")
    assert made.uniform(3).tolist() == GOLDEN["uniform"]
    assert made.uniform(2, dtype=torch.float64).tolist() == GOLDEN["uniform64"]
    assert made.normal(3).tolist() == GOLDEN["normal"]
    assert made.normal(2, dtype=torch.float64).tolist() == GOLDEN["normal64"]
    assert made.permutation(8).tolist() == GOLDEN["permutation"]
    assert [made.integer(1000) for _ in range(4)] == GOLDEN["integers"]


GOLDEN: dict[str, list] = {
    "uniform": [0.3567083477973938, 0.8409373164176941, 0.33712971210479736],
    "uniform64": [0.8472408659759495, 0.7421969952236058],
    "normal": [-0.823898196220398, 0.12134551256895065, -1.082767367362976],
    "normal64": [0.8345277798438396, -0.2629028876733148],  # the first is 0.83452777984383949...
    "permutation": [2, 3, 6, 4, 5, 0, 1, 7],
    "integers": [251, 463, 981, 665],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_have_the_distribution_they_are_named_after(dtype: torch.dtype) -> None:
    made = stream(0, 0, 0, "distribution")
    drawn = made.uniform(300, 1000, dtype=dtype)
    assert (drawn.shape, drawn.dtype) == ((300, 1000), dtype)
    assert 0 <= float(drawn.min()) <= float(drawn.max()) < 1
    assert stats.kstest(drawn.flatten().double().numpy(), "uniform").pvalue > 1e-3
    normal = made.normal(299, 1001, dtype=dtype).flatten().double().numpy()
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / normal.size)
    assert abs((normal**4).mean() - 3) < 5 * math.sqrt(96 / normal.size)
    assert abs(stats.pearsonr(normal[0::2][:-1] ** 2, normal[1::2] ** 2).statistic) < 0.015
    assert made.normal(0).shape == (0,)
    assert made.normal().shape == ()


def test_a_uniform_number_never_rounds_up_to_one() -> None:
    class Highest(Stream):
        def _bytes(self, count: int) -> bytes:
            return b"\xff" * count

    for dtype in (torch.float32, torch.float64):
        assert Highest(b"").uniform(1, dtype=dtype).item() == 1 - torch.finfo(dtype).eps / 2
    assert math.isfinite(Highest(b"").normal(2, dtype=torch.float64).sum())


def test_every_order_and_every_number_is_as_likely_as_any_other() -> None:
    made = stream(0, 0, 0, "orders")
    orders = Counter(tuple(made.permutation(4).tolist()) for _ in range(24_000))
    assert len(orders) == 24
    assert stats.chisquare(list(orders.values())).pvalue > 1e-3
    assert sorted(made.permutation(1000).tolist()) == list(range(1000))
    numbers = Counter(made.integer(7) for _ in range(14_000))
    assert stats.chisquare([numbers[n] for n in range(7)]).pvalue > 1e-3
    assert all(made.integer(1) == 0 for _ in range(3))


def test_words_of_the_incomplete_cycle_are_drawn_again() -> None:
    class Listed(Stream):
        def words(self, count: int) -> np.ndarray:
            return np.array([given_words.pop(0)], np.uint64)

    given_words = [2**64 - 1, 2**64 - 2, 12]
    assert Listed(b"").integer(2**63 - 1) == 12
    given_words = [2**64 - 1]
    assert Listed(b"").integer(2**64) == 2**64 - 1


def test_elementary_functions_are_right_to_the_last_bits() -> None:
    near_one = 1 - np.arange(1, 1000) * 2.0**-53
    x = np.concatenate([stream(0, 0, 0, "x").uniform(100_000, dtype=torch.float64).numpy() + 2.0**-53, near_one])
    assert np.abs(random_streams._logarithm(x) / np.log(x) - 1).max() < 5e-16
    angle = (x - 0.5) * math.pi / 2
    square = angle * angle
    assert np.abs(random_streams._polynomial(random_streams.COSINE, square) - np.cos(angle)).max() < 3e-16
    assert np.abs(random_streams._polynomial(random_streams.SINE, square) * angle - np.sin(angle)).max() < 3e-16


@given(count=st.integers(0, 70), streams=st.integers(1, 4))
def test_permutations_at_once_are_those_of_every_stream_alone(count: int, streams: int) -> None:
    def made() -> list[Stream]:
        return [stream(0, 1, client, "batches") for client in range(streams)]

    together, alone = made(), made()
    for _ in range(2):  # a second epoch goes on where the first one ended
        found = permutations(together, count)
        assert found.tolist() == [each.permutation(count).tolist() for each in alone]
