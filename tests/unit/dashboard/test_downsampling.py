"""Less of long things."""

from __future__ import annotations

import math

import pytest

from fedprompt.dashboard.downsampling import ends_and_middle, evenly, kept, plain, stride

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("count", "every"), [(0, 1), (600, 1), (601, 2), (1200, 2), (1201, 4), (10_000, 32)])
def test_a_curve_is_thinned_by_powers_of_two_and_never_has_more_than_six_hundred_points(count: int, every: int) -> None:
    assert stride(count) == every
    assert len(kept(count, every)) <= 601


def test_a_thinned_curve_ends_with_its_last_point() -> None:
    assert kept(10, 4) == [0, 4, 8, 9]
    assert kept(9, 4) == [0, 4, 8]


def test_what_follows_a_place_goes_on_with_the_same_steps() -> None:
    assert kept(20, 4, after=8) == [12, 16, 19]
    assert kept(9, 4, after=8) == []


def test_pieces_of_a_growing_curve_add_up_to_the_whole() -> None:
    for every in (1, 4):
        shown: list[int] = []
        for count in range(1, 40):
            settled = (shown[-1] if shown else -1) // every * every
            shown = [place for place in shown if place <= settled] + kept(count, every, settled)
            assert shown == kept(count, every)


def test_evenly_keeps_the_first_and_the_last() -> None:
    assert evenly(range(100), 4) == [0, 33, 66, 99]
    assert evenly([1, 2], 4) == [1, 2]


def test_of_many_clients_the_worst_the_middle_and_the_best_are_kept() -> None:
    assert ends_and_middle(range(100), 6) == [0, 1, 49, 50, 98, 99]
    assert ends_and_middle(range(5), 6) == [0, 1, 2, 3, 4]


def test_what_is_not_finite_becomes_null() -> None:
    assert plain({"a": [math.nan, 1.5, (math.inf,)], 3: "x" * 5000}) == {
        "a": [None, 1.5, [None]],
        "3": "x" * 4000 + "…",
    }
