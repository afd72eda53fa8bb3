"""Lists of images in two arrays, and names made on demand: they behave like the lists they stand for."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedprompt.data.partition import index_lists
from fedprompt.data.partition.client_names import NumberedNames, as_fact, compact, from_fact
from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.errors import DataError

pytestmark = pytest.mark.unit
numbers = st.integers(-(2**40), 2**40)


@given(st.lists(st.lists(numbers)))
def test_lists_come_back_as_they_went_in(lists: list[list[int]]) -> None:
    kept = IndexLists.of(np.array(part, dtype=np.int64) for part in lists)
    for found in (kept, IndexLists.unpacked(kept.packed())):
        assert [part.tolist() for part in found] == lists
        assert found.sizes.tolist() == [len(part) for part in lists]
        assert found.owners.tolist() == [place for place, part in enumerate(lists) for _ in part]
        assert [part.tolist() for part in found[1:3]] == lists[1:3]
        if lists:
            assert found[-1].tolist() == lists[-1]


@given(st.lists(st.lists(st.lists(numbers)), min_size=1, max_size=4))
def test_joined_lists_follow_each_other(parts: list[list[list[int]]]) -> None:
    joined = IndexLists.joined([IndexLists.of(np.array(each) for each in part) for part in parts])
    assert [each.tolist() for each in joined] == [each for part in parts for each in part]


def test_many_sorted_lists_take_few_bytes() -> None:
    lists = IndexLists.of_sizes(np.arange(100_000), np.full(20_000, 5))
    assert len(lists.packed()) < 10_000  # of 960,000


def packed(values: list[int]) -> str:
    """Whole numbers as `packed` writes them, whatever they mean."""
    raw = (np.array(values, dtype="<i8") << 1).view(np.uint8).reshape(-1, 8).T
    return base64.b64encode(zlib.compress(np.ascontiguousarray(raw).tobytes())).decode()


@given(st.text() | st.binary(max_size=40).map(lambda raw: base64.b64encode(zlib.compress(raw)).decode()))
@example(packed([3, 1, 1]))
@example(packed([2**60]))
@example(packed([2, -1, 3, 0, 0]))
@example(packed([2, 2**62, 2**62, 0]))
@example(packed([1, 3, 0, 0]))
def test_text_that_was_not_packed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        IndexLists.unpacked(text)


def test_a_bomb_does_not_unfold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_lists, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        IndexLists.unpacked(packed([200, *[1] * 400]))


def test_what_could_not_be_unpacked_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_lists, "MOST_BYTES", 80)
    most = IndexLists.of_sizes(np.arange(7), np.array([3, 4]))
    assert IndexLists.unpacked(most.packed()).values.tolist() == list(range(7))
    with pytest.raises(DataError, match=r"a partition must have at most 9 clients and images together .*got 10"):
        IndexLists.of_sizes(np.arange(8), np.array([4, 4])).packed()


@given(st.integers(1, 1200), st.data())
def test_numbered_names_are_the_list_they_stand_for(count: int, data: st.DataObject) -> None:
    width = len(str(count - 1))
    naive, names = [f"client_{number:0{width}d}" for number in range(count)], NumberedNames(count)
    place = data.draw(st.integers(0, count - 1))
    assert (len(names), list(names)) == (count, naive)
    assert (names[place], names[place - count], names[:3]) == (naive[place], naive[place], tuple(naive[:3]))
    assert names.index(naive[place]) == place
    assert sorted(names) == naive
    assert names == naive
    assert names == NumberedNames(count)
    assert names != naive[1:]
    assert compact(naive) == names
    assert isinstance(compact(naive), NumberedNames)


@pytest.mark.parametrize("name", ["client_11", "client_1", "client_007", "client_", "07", "client_+7", "client_\u0667"])
def test_a_name_that_is_only_similar_is_none(name: str) -> None:
    names = NumberedNames(11)
    assert name not in names
    with pytest.raises(ValueError, match="is none of 11 numbered clients"):
        names.index(name)


def test_a_number_is_no_name_and_no_place_beyond_the_last() -> None:
    assert 7 not in NumberedNames(11)
    with pytest.raises(IndexError):
        NumberedNames(11)[11]


def test_other_names_stay_as_they_are() -> None:
    names = compact(["ward", "clinic"])
    assert names == ("ward", "clinic")
    assert from_fact(as_fact(names)) == ["ward", "clinic"]
    assert from_fact(as_fact(NumberedNames(12)))[11] == "client_11"


@pytest.mark.parametrize("fact", [None, {}, 3, [1], {"numbered": 0}, {"numbered": True}, {"numbered": 10**30}])
def test_a_fact_that_is_no_names_is_refused(fact: object) -> None:
    with pytest.raises(ValueError, match="must be a list of names, or their number"):
        from_fact(fact)
