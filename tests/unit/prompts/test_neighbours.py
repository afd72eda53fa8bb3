"""Neighbours against brute force in plain Python, ties included, and draws that are fair and repeatable."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedprompt.prompts.neighbours import drawn, nearest

pytestmark = pytest.mark.unit

SHAPE = (2, 3)


def brute_force(own: Tensor, others: dict[int, Tensor], count: int) -> list[int]:
    reference = own.flatten().tolist()

    def distance(key: int) -> float:
        differences = [x - y for x, y in zip(others[key].flatten().tolist(), reference, strict=True)]
        return math.fsum(each * each for each in differences)

    return sorted(others, key=lambda key: (distance(key), key))[:count]


def tensors(values: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
    size = math.prod(SHAPE)
    return st.lists(values, min_size=size, max_size=size).map(lambda numbers: torch.tensor(numbers).view(SHAPE).float())


@given(
    own=tensors(st.integers(-1, 1)),
    others=st.dictionaries(st.integers(0, 200), tensors(st.integers(-1, 1)), max_size=12),
    count=st.integers(0, 15),
)
def test_small_integers_with_many_ties_are_ordered_as_by_brute_force(
    own: Tensor, others: dict[int, Tensor], count: int
) -> None:
    found = nearest(own, others, count)
    assert found == brute_force(own, others, count)
    assert len(found) == min(count, len(others))


@given(
    own=tensors(st.floats(-1e3, 1e3, width=32)),
    others=st.dictionaries(st.integers(0, 200), tensors(st.floats(-1e3, 1e3, width=32)), max_size=8),
    count=st.integers(0, 10),
)
def test_any_numbers_are_as_near_as_by_brute_force(own: Tensor, others: dict[int, Tensor], count: int) -> None:
    """Where two distances differ only by rounding either order will do, so distances are compared."""

    def distances(keys: list[int]) -> list[float]:
        return [math.dist(own.flatten().tolist(), others[key].flatten().tolist()) for key in keys]

    found = nearest(own, others, count)
    assert len(set(found)) == len(found)
    assert distances(found) == pytest.approx(distances(brute_force(own, others, count)), rel=1e-12)


def test_equal_tensors_are_ordered_by_key_wherever_they_stand() -> None:
    generator = torch.Generator().manual_seed(0)
    twin = torch.randn(16, 32, generator=generator)
    others = {key: twin.clone() for key in (90, 3, 41, 7, 12)} | {5: 100 * twin}
    assert nearest(torch.zeros(16, 32), others, 4) == [3, 7, 12, 41]
    assert nearest(torch.zeros(16, 32), others, 9) == [3, 7, 12, 41, 90, 5]


def test_distances_too_small_for_single_precision_still_count() -> None:
    """Golden: squares of 1e-25 are zero in single precision, and the nearer one has the larger key."""
    own = torch.zeros(4)
    others = {0: torch.full((4,), 3e-25), 1: torch.full((4,), 2e-25), 2: torch.full((4,), 1e-25)}
    assert nearest(own, others, 3) == [2, 1, 0]


def test_a_changed_entry_changes_the_neighbours_at_once() -> None:
    own, others = torch.zeros(3), {1: torch.ones(3), 2: 2 * torch.ones(3)}
    assert nearest(own, others, 1) == [1]
    others[1] = 5 * torch.ones(3)
    assert nearest(own, others, 1) == [2]
    assert nearest(5 * torch.ones(3), others, 1) == [1]


def test_a_draw_is_without_repetition_repeatable_and_fair() -> None:
    keys = [9, 2, 4, 30, 11]
    once, again = (drawn(keys, 3, torch.Generator().manual_seed(7)) for _ in range(2))
    assert once == again == drawn(sorted(keys), 3, torch.Generator().manual_seed(7))
    assert drawn([], 3, torch.Generator()) == []
    counts: Counter[int] = Counter()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        found = drawn(keys, 3, generator)
        assert len(set(found)) == 3
        counts.update(found)
    assert set(counts) == set(keys)
    assert all(abs(count / 2000 - 3 / 5) < 0.05 for count in counts.values())
    assert sorted(drawn(keys, 9, generator)) == sorted(keys)
