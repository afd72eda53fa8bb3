"""Which cases of long tests `make test` runs: the same ones whatever else is collected, and some of every method."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import module_at

from fedprompt.core import registry

pytestmark = pytest.mark.unit

TESTS = Path(__file__).resolve().parents[1]
conftest = module_at(TESTS / "conftest.py")
OF_KINDS = "test_every_variant_wraps_every_kind_of_method_and_resumes_to_the_same_bits"  # of no registered method
SAMPLED = re.compile(r"^@pytest\.mark\.sampled\n(?:[@ )].*\n)*def (test_\w+)", re.MULTILINE)


def of_matrix() -> list[str]:
    """The sampled tests that every method goes through."""
    return sorted(
        name
        for path in (TESTS / "matrix").glob("test_*.py")
        for name in SAMPLED.findall(path.read_text())
        if name != OF_KINDS
    )


def chosen(pairs: Iterable[tuple[str, str]], sampled: bool = True) -> set[tuple[str, str]]:
    """The cases that the hook leaves in `make test`."""
    items: list[Any] = []
    for test, case in pairs:
        marks: list[Any] = []
        items.append(
            SimpleNamespace(
                get_closest_marker=lambda name: sampled and name == "sampled",
                originalname=test,
                callspec=SimpleNamespace(id=case),
                add_marker=marks.append,
                marks=marks,
                pair=(test, case),
            )
        )
    conftest.pytest_collection_modifyitems(items)
    assert all(mark.name == "slow" for item in items for mark in item.marks)
    return {item.pair for item in items if not item.marks}


def all_pairs(cases: Iterable[str]) -> list[tuple[str, str]]:
    cases = list(cases)
    return [(test, case) for test in of_matrix() for case in cases]


def test_neither_a_new_method_nor_another_order_nor_a_selection_changes_the_choice() -> None:
    pairs = all_pairs(registry.methods())
    before = chosen(pairs)
    shuffled = random.Random(0).sample(pairs, len(pairs))
    assert chosen(shuffled) == before
    assert chosen(pairs[::7]) == before & set(pairs[::7])
    more = chosen(all_pairs(["a_new_method", *registry.methods()]))
    assert {(test, case) for test, case in more if case != "a_new_method"} == before


def test_every_method_is_in_some_test_and_every_test_has_some_methods() -> None:
    pairs = all_pairs(registry.methods())
    found = chosen(pairs)
    assert {case for _, case in found} == set(registry.methods())
    assert {test for test, _ in found} == set(of_matrix())
    assert 0.15 < len(found) / len(pairs) < 0.4


def test_a_method_of_any_name_is_in_some_test() -> None:
    names = [f"method_{number}" for number in range(100)]
    assert {case for _, case in chosen(all_pairs(names))} == set(names)


def test_a_test_without_the_mark_keeps_all_cases() -> None:
    short = [("test_something_short", f"case_{number}") for number in range(9)]
    assert chosen(short, sampled=False) == set(short)
