"""Aggregation as mathematics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from fedprompt.errors import ContractError
from fedprompt.federation.aggregate import shares, weighted_mean

pytestmark = pytest.mark.unit

sizes = some.lists(some.integers(0, 10_000), min_size=1, max_size=8).filter(any)


@given(sizes)
def test_shares_are_not_negative_and_sum_to_one(values: list[int]) -> None:
    found = shares([float(value) for value in values])
    assert min(found) >= 0
    assert sum(found) == pytest.approx(1.0, abs=1e-12)


@given(sizes)
def test_a_client_without_samples_changes_nothing(values: list[int]) -> None:
    tensors = [{"x": torch.full((2,), float(number))} for number in range(len(values))]
    plain = weighted_mean(tensors, shares([float(v) for v in values]))
    extra = weighted_mean([*tensors, {"x": torch.full((2,), 1e6)}], shares([*[float(v) for v in values], 0.0]))
    assert torch.equal(plain["x"], extra["x"])


@given(sizes, some.integers(0, 1000))
def test_the_mean_of_equal_tensors_is_that_tensor(values: list[int], seed: int) -> None:
    tensor = torch.randn(5, generator=torch.Generator().manual_seed(seed))
    found = weighted_mean([{"x": tensor}] * len(values), shares([float(v) for v in values]))
    torch.testing.assert_close(found["x"], tensor, rtol=1e-6, atol=1e-7)


@given(sizes.filter(lambda v: len(v) > 1), some.randoms())
def test_the_order_of_clients_does_not_matter(values: list[int], random: object) -> None:
    generator = torch.Generator().manual_seed(len(values))
    pairs = list(
        zip(
            [{"x": torch.randn(4, generator=generator)} for _ in values],
            shares([float(v) for v in values]),
            strict=True,
        )
    )
    mixed = list(pairs)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    first = weighted_mean([t for t, _ in pairs], [w for _, w in pairs])
    second = weighted_mean([t for t, _ in mixed], [w for _, w in mixed])
    torch.testing.assert_close(first["x"], second["x"], rtol=1e-6, atol=1e-6)


def test_a_weighted_mean_by_hand() -> None:
    tensors = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([5.0, 10.0])}]
    assert weighted_mean(tensors, shares([3.0, 1.0]))["x"].tolist() == [2.0, 4.0]


def test_one_client_keeps_its_bits() -> None:
    tensor = torch.randn(100)
    assert torch.equal(weighted_mean([{"x": tensor}], shares([7.0]))["x"], tensor)


@pytest.mark.parametrize("values", [[0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_impossible_weights_are_refused(values: list[float]) -> None:
    with pytest.raises(ContractError, match="aggregation weights must"):
        shares(values)


def test_an_empty_cohort_is_refused() -> None:
    with pytest.raises(ContractError, match="at least one upload"):
        weighted_mean([], [])
