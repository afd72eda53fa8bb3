"""Neighbours against a naive search, ties and near ties included, in memory that does not grow; and draws that are fair and repeatable."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import seeded
from torch import Tensor

from fedprompt.modules import knn
from fedprompt.modules.knn import Block, drawn, nearest, squared_distances

pytestmark = pytest.mark.unit

SIZE = 6


def naive(own: int, rows: dict[int, Tensor], count: int) -> list[int]:
    """One by one in double precision, equal distances by key."""

    def distance(key: int) -> float:
        return float((rows[key].double() - rows[own].double()).square().numpy().sum())

    return sorted((key for key in rows if key != own), key=lambda key: (distance(key), key))[:count]


def exact(own: int, rows: dict[int, Tensor], count: int) -> list[int]:
    """In plain Python, without rounding."""

    def distance(key: int) -> float:
        pairs = zip(rows[key].tolist(), rows[own].tolist(), strict=True)
        return math.fsum((x - y) ** 2 for x, y in pairs)

    return sorted((key for key in rows if key != own), key=lambda key: (distance(key), key))[:count]


def blocks(rows: dict[int, Tensor], size: int, last: int = 0) -> list[Block]:
    """Blocks of a size by rising keys; some rows come last, as those of a round under way do."""
    keys = sorted(rows)
    parts = [keys[start : start + size] for start in range(last, len(keys), size)] + ([keys[:last]] if last else [])
    return [Block(np.array(part), torch.stack([rows[key] for key in part])) for part in parts]


def search(rows: dict[int, Tensor], asking: list[int], count: int, size: int, last: int = 0) -> dict[int, list[int]]:
    return nearest({key: rows[key] for key in asking}, blocks(rows, size, last), count)


def flat(values: st.SearchStrategy[float], dtype: torch.dtype = torch.float32) -> st.SearchStrategy[Tensor]:
    return st.lists(values, min_size=SIZE, max_size=SIZE).map(lambda numbers: torch.tensor(numbers, dtype=dtype))


def pools(rows: st.SearchStrategy[Tensor]) -> st.SearchStrategy[dict[int, Tensor]]:
    return st.dictionaries(st.integers(0, 200), rows, min_size=1, max_size=20)


@given(data=st.data(), rows=pools(flat(st.integers(-1, 1))), count=st.integers(0, 15), size=st.integers(1, 8))
def test_small_integers_with_many_ties_are_ordered_as_by_brute_force(
    data: st.DataObject, rows: dict[int, Tensor], count: int, size: int
) -> None:
    last = data.draw(st.integers(0, len(rows) - 1))
    for own, found in search(rows, sorted(rows), count, size, last).items():
        assert found == naive(own, rows, count) == exact(own, rows, count)
        assert len(found) == min(count, len(rows) - 1)


NUMBERS = st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, 1e-25, 2e-25, 1e-40, 1e30, -3e38])


@given(
    rows=pools(flat(NUMBERS)),
    twins=st.lists(st.integers(0, 19), max_size=10),
    nudge=st.sampled_from([0.0, 1e-7, 1e-3]),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    count=st.integers(1, 6),
    size=st.integers(1, 8),
)
def test_any_numbers_twins_near_twins_and_offsets_give_what_the_naive_search_gives(
    rows: dict[int, Tensor], twins: list[int], nudge: float, offset: float, count: int, size: int
) -> None:
    keys = sorted(rows)
    copies = {201 + place: rows[keys[twin % len(keys)]] * (1 + nudge) for place, twin in enumerate(twins)}
    rows = {key: row + offset for key, row in {**rows, **copies}.items()}
    for own, found in search(rows, sorted(rows), count, size).items():
        assert found == naive(own, rows, count)


@given(rows=pools(flat(st.floats(-10, 10), torch.float64)), offset=st.sampled_from([0.0, 1e9]))
def test_double_precision_is_not_cut_to_single(rows: dict[int, Tensor], offset: float) -> None:
    rows = {key: row + offset for key, row in rows.items()}
    for own, found in search(rows, sorted(rows), 3, 4).items():
        assert found == naive(own, rows, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_tight_clusters_of_long_rows_far_from_each_other(dtype: torch.dtype, scale: float) -> None:
    """Distances within a cluster drown in the rounding of single precision: the pass in double precision decides."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 2048, generator=generator, dtype=torch.float64)
    kinds = torch.randint(4, (600,), generator=generator)
    noise = torch.randn(600, 2048, generator=generator, dtype=torch.float64)
    rows = dict(enumerate((centres[kinds] + scale * noise + 3).to(dtype)))
    for own, found in search(rows, list(range(0, 600, 37)), 9, 100).items():
        assert found == naive(own, rows, 9)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many pairs of rows were compared exactly."""
    counter = Counter[str]()

    def counted(rows: Tensor, own: Tensor) -> np.ndarray:
        counter["pairs"] += len(rows)
        return squared_distances(rows, own)

    monkeypatch.setattr(knn, "squared_distances", counted)
    return counter


def test_far_rows_are_never_compared(compared: Counter[str]) -> None:
    rows = dict(enumerate(torch.randn(4000, 512, generator=torch.Generator().manual_seed(0))))
    assert search(rows, list(range(8)), 9, 500) == {own: naive(own, rows, 9) for own in range(8)}
    assert compared["pairs"] < 8 * 200, "of 8 x 4000"


def test_a_crowd_that_single_precision_cannot_tell_apart_is_thinned_out_in_double(compared: Counter[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    centres, noise = (torch.randn(count, 512, generator=generator) for count in (2, 2000))
    rows = dict(enumerate(centres.repeat(1000, 1) + 1e-4 * noise))
    assert search(rows, list(range(8)), 9, 500) == {own: naive(own, rows, 9) for own in range(8)}
    assert compared["pairs"] < 8 * 300, "of 8 x 1000 within the clusters"


def test_equal_rows_are_ordered_by_key_and_soon_done_with(compared: Counter[str]) -> None:
    twin = torch.randn(512, generator=torch.Generator().manual_seed(0))
    rows = {key: twin.clone() for key in range(3, 2000)}
    assert search(rows, [3, 4, 1000], 3, 100) == {3: [4, 5, 6], 4: [3, 5, 6], 1000: [3, 4, 5]}
    assert compared["pairs"] <= 3 * 64
    assert search(rows, [1000], 3, 100, last=50) == {1000: [3, 4, 5]}, "rows of low keys that come last"


def test_distances_too_small_for_single_precision_still_count() -> None:
    """Golden: squares of 1e-25 are zero in single precision, and the nearer one has the larger key."""
    rows = {9: torch.zeros(4), **{key: torch.full((4,), (3 - key) * 1e-25) for key in range(3)}}
    assert search(rows, [9], 3, 8) == {9: [2, 1, 0]}


@pytest.mark.parametrize("scale", [1e-19, 1e-22, 1e-25])
def test_many_distances_that_underflow_in_single_precision_are_told_apart(scale: float) -> None:
    rows = dict(enumerate(scale * torch.randn(200, 32, generator=torch.Generator().manual_seed(0))))
    assert search(rows, [0, 50], 5, 40) == {own: naive(own, rows, 5) for own in (0, 50)}


@given(size=st.integers(1, 3000), count=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_distance_is_the_same_bits_whatever_rows_stand_around_it(size: int, count: int, seed: int) -> None:
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    together = squared_distances(rows, rows[0])
    assert together.tolist() == [
        float(squared_distances(rows[place : place + 1], rows[0])[0]) for place in range(count)
    ]


def test_memory_does_not_grow_with_the_pool() -> None:
    def stream(count: int) -> Iterator[Block]:
        for number in range(count):
            generator = torch.Generator().manual_seed(number)
            yield Block(
                np.arange(500) + 500 * number,
                torch.from_numpy(np.empty((500, 256), np.float32)).normal_(generator=generator),
            )

    def peak(count: int) -> int:
        own = {key: torch.full((256,), float(key)) for key in range(16)}
        tracemalloc.start()
        try:
            assert len(nearest(own, stream(count), 9)[3]) == 9
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(40) < 1.2 * peak(4)


def test_a_draw_is_without_repetition_repeatable_and_fair() -> None:
    keys = [9, 2, 4, 30, 11]
    once, again = (drawn(keys, 3, seeded(7)) for _ in range(2))
    assert once == again == drawn(sorted(keys), 3, seeded(7))
    assert drawn([], 3, seeded()) == []
    counts: Counter[int] = Counter()
    generator = seeded()
    for _ in range(2000):
        found = drawn(keys, 3, generator)
        assert len(set(found)) == 3
        counts.update(found)
    assert set(counts) == set(keys)
    assert all(abs(count / 2000 - 3 / 5) < 0.05 for count in counts.values())
    assert sorted(drawn(keys, 9, generator)) == sorted(keys)
