"""Aggregation as mathematics."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from fedprompt.config import AggregationConfig
from fedprompt.core.method import Combine, shares
from fedprompt.errors import ContractError
from fedprompt.federation.aggregate import geometric_centre, krum_order, rule, weighted_mean
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

ROBUST = ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "clipped_mean")
seeds = some.integers(0, 10_000)
few = settings(max_examples=25)  # of every rule
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


def made(name: str, **changes: Any) -> Combine:
    return rule(AggregationConfig(rule=name, **changes))


def cohort(seed: int, clients: int) -> list[Tensors]:
    """Two tensors a client, so that rules have to read them together."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"b": torch.randn(2, 2, generator=generator), "a": torch.randn(3, generator=generator)} for _ in range(clients)
    ]


def column(*values: float) -> list[Tensors]:
    return [{"x": torch.tensor([value], dtype=torch.float64)} for value in values]


def even(tensors: list[Tensors]) -> list[float]:
    return [1 / len(tensors)] * len(tensors)


def vector(tensors: Tensors) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def moved(tensors: Tensors, by: float) -> Tensors:
    return {name: tensor + by for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["mean", *ROBUST])
@pytest.mark.parametrize("clients", [1, 2, 3, 5, 8])
def test_copies_of_a_set_give_back_that_set(name: str, clients: int) -> None:
    one = cohort(3, 1)[0]
    found = made(name)([one] * clients, even([one] * clients))
    assert list(found) == list(one)
    for key in one:
        torch.testing.assert_close(found[key], one[key], rtol=1e-7 if name == "mean" else 0, atol=0)


@pytest.mark.parametrize("name", ROBUST)
@few
@given(seed=seeds, clients=some.integers(2, 9), random=some.randoms())
def test_the_order_of_clients_changes_no_bit_of_a_robust_rule(name: str, seed: int, clients: int, random: Any) -> None:
    tensors = [{key: tensor.double() / 3 for key, tensor in part.items()} for part in cohort(seed, clients)]
    tensors[-1] = tensors[0]  # a tie
    mixed = random.sample(tensors, clients)
    combine, around = made(name, malicious=0.3), cohort(seed + 1, 1)[0]
    assert same(combine(tensors, even(tensors), around), combine(mixed, even(tensors), around))


@pytest.mark.parametrize("name", ["mean", *ROBUST])
@few
@given(seed=seeds, clients=some.integers(1, 9))
def test_a_shift_of_all_clients_shifts_the_result(name: str, seed: int, clients: int) -> None:
    tensors, around = cohort(seed, clients), cohort(seed + 1, 1)[0]
    combine = made(name)
    here = combine(tensors, even(tensors), around)
    there = combine([moved(part, 8.0) for part in tensors], even(tensors), moved(around, 8.0))
    torch.testing.assert_close(vector(there), vector(here) + 8.0, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ROBUST)
@few
@given(seed=seeds, clients=some.integers(1, 9))
def test_robust_rules_count_each_client_once_and_members_only(name: str, seed: int, clients: int) -> None:
    tensors, around = cohort(seed, clients), cohort(seed + 1, 1)[0]
    combine = made(name)
    plain = combine(tensors, even(tensors), around)
    stranger = {key: torch.full_like(tensor, 1e6) for key, tensor in tensors[0].items()}
    broken_one = {key: torch.full_like(tensor, math.nan) for key, tensor in tensors[0].items()}
    uneven = shares([1.0 + number**3 for number in range(clients)])
    assert same(plain, combine([stranger, *tensors, broken_one], [0.0, *uneven, 0.5], around))


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("value", [1e6, -1e30])
@few
@given(seed=seeds, clients=some.integers(5, 11), collude=some.booleans())
def test_a_malicious_minority_does_not_decide(name: str, value: float, seed: int, clients: int, collude: bool) -> None:
    f = (clients - 3) // 2 if "krum" in name else (clients - 1) // 2  # Krum needs n > 2f + 2
    honest = cohort(seed, clients - f)
    forged = [moved(part, value) for part in ([honest[0]] * f if collude else cohort(seed + 1, f))]
    around = {key: torch.zeros_like(tensor) for key, tensor in honest[0].items()}
    tensors = [*forged, *honest]
    found = vector(made(name, malicious=f / clients)(tensors, even(tensors), around))
    rows = torch.stack([vector(part) for part in honest])
    low, high = rows.min(0).values, rows.max(0).values
    mean = vector(weighted_mean(tensors, even(tensors)))
    assert not bool(((mean >= low) & (mean <= high)).all())
    if name == "geometric_median":  # z is no worse than 0: sum_honest (|z| - |x|) - sum_forged |z| <= sum_honest |x|
        assert found.norm() <= 2 * rows.norm(dim=1).sum() / (clients - 2 * f)
    elif name == "clipped_mean":
        assert found.norm() <= 1 + 1e-6
    else:
        assert bool(((found >= low - 1e-6) & (found <= high + 1e-6)).all())
    if name == "krum":
        assert any(torch.equal(found, row) for row in rows)
    if name == "multi_krum":
        torch.testing.assert_close(found, rows.mean(0), rtol=0, atol=1e-6)


@few
@given(seed=seeds, clients=some.integers(1, 9))
def test_medians_agree_with_numpy(seed: int, clients: int) -> None:
    tensors = cohort(seed, clients)
    found = made("median")(tensors, even(tensors))
    for name, tensor in found.items():
        expected = np.median(np.stack([part[name].double().numpy() for part in tensors]), axis=0)
        assert np.array_equal(tensor.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("values", "malicious", "expected"),
    [
        ([9.0, 1.0, 2.0, 6.0, -50.0], 0.2, 3.0),  # 1, 2 and 6 are left
        ([9.0, 1.0, 2.0, 6.0, -50.0], 0.19, -6.4),  # nothing is cut off
        ([9.0, 1.0, 2.0, 6.0, -50.0], 0.49, 2.0),
        ([4.0, 8.0], 0.49999999999, 6.0),  # somebody is always left
        ([7.0], 0.4, 7.0),
        ([1e9] * 29 + [0.0] * 71, 0.29, 0.0),  # 0.29 * 100 is 28.999999999999996
    ],
)
def test_a_trimmed_mean_by_hand(values: list[float], malicious: float, expected: float) -> None:
    tensors = column(*values)
    found = made("trimmed_mean", malicious=malicious)(tensors, even(tensors))["x"]
    assert found.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("trimmed_mean", {"malicious": 0}), ("multi_krum", {"malicious": 0}), ("clipped_mean", {"radius": 1e30})],
)
@few
@given(seed=seeds, clients=some.integers(1, 9))
def test_without_suspicion_a_rule_is_the_plain_mean(
    name: str, changes: dict[str, Any], seed: int, clients: int
) -> None:
    tensors = cohort(seed, clients)
    found = made(name, **changes)(tensors, even(tensors), cohort(seed + 1, 1)[0])
    torch.testing.assert_close(vector(found), vector(weighted_mean(tensors, even(tensors))), rtol=1e-6, atol=1e-6)


def naive_krum_scores(rows: list[list[float]], f: int) -> list[float]:
    scores = []
    for i, one in enumerate(rows):
        squares = []
        for j, other in enumerate(rows):
            if i != j:
                squares.append(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))
        scores.append(sum(sorted(squares)[: max(1, len(rows) - f - 2)]))
    return scores


@few
@given(seed=seeds, clients=some.integers(2, 12), malicious=some.floats(0, 0.49))
def test_krum_agrees_with_a_double_loop(seed: int, clients: int, malicious: float) -> None:
    tensors = cohort(seed, clients)
    f = int(malicious * clients)
    rows = torch.stack([vector(part) for part in tensors])
    scores = naive_krum_scores(rows.tolist(), f)
    order = krum_order(rows, f).tolist()
    assert sorted(order) == list(range(clients))
    assert all(scores[one] <= scores[two] + 1e-9 for one, two in pairwise(order))

    chosen = vector(made("krum", malicious=malicious)(tensors, even(tensors)))
    winners = [row for row, score in zip(rows, scores, strict=True) if score <= min(scores) + 1e-9]
    assert torch.equal(chosen, min(winners, key=Tensor.tolist))  # the first in lexicographic order
    best = sorted(range(clients), key=lambda i: (round(scores[i], 9), rows[i].tolist()))[: clients - f]
    averaged = vector(made("multi_krum", malicious=malicious)(tensors, even(tensors)))
    torch.testing.assert_close(averaged, rows[best].mean(0), rtol=0, atol=1e-6)


def sum_of_distances(rows: Tensor, points: Tensor) -> Tensor:
    return (rows[None] - points[:, None]).square().sum(-1).sqrt().sum(1)


def searched(rows: Tensor) -> Tensor:
    """The geometric median in two dimensions by brute force: ever finer grids around the best point so far."""
    centre, width = rows.mean(0), float((rows.max(0).values - rows.min(0).values).max()) + 1e-9
    steps = torch.linspace(-1, 1, 21, dtype=torch.float64)
    for _ in range(40):
        grid = centre + width * torch.cartesian_prod(steps, steps)
        centre = grid[sum_of_distances(rows, grid).argmin()]
        width *= 0.5
    return centre


@few
@given(seed=seeds, clients=some.integers(3, 8), whole=some.booleans())
def test_the_geometric_median_agrees_with_brute_force(seed: int, clients: int, whole: bool) -> None:
    rows = torch.randn(clients, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = (2 * rows).round() if whole else rows  # whole numbers: points that coincide or lie on a line
    expected = searched(rows)
    found = geometric_centre(rows)
    best, reached = sum_of_distances(rows, torch.stack([expected, found]))
    assert reached <= best + 1e-9
    if not whole:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@few
@given(seed=seeds, clients=some.integers(3, 10), width=some.integers(2, 40))
def test_the_geometric_median_is_where_all_pulls_cancel(seed: int, clients: int, width: int) -> None:
    rows = torch.randn(clients, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = geometric_centre(rows)
    lengths = (rows - found).norm(dim=1)
    away = lengths > 1e-9
    pull = ((rows - found)[away] / lengths[away, None]).sum(0).norm()
    assert pull <= int((~away).sum()) + 1e-5


@few
@given(some.lists(some.integers(-50, 50), min_size=1, max_size=9))
def test_on_a_line_the_geometric_median_is_the_median(values: list[int]) -> None:
    tensors = column(*map(float, values))
    found = made("geometric_median")(tensors, even(tensors))["x"]
    assert found.item() == pytest.approx(float(np.median(values)), abs=1e-9)


def test_the_geometric_median_of_known_figures() -> None:
    root = math.sqrt(3)
    triangle = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, root]], dtype=torch.float64)
    torch.testing.assert_close(geometric_centre(triangle), torch.tensor([0.0, root / 3], dtype=torch.float64))
    blunt = torch.tensor(
        [[-9.0, 1.0], [9.0, 1.0], [0.1, 0.0]], dtype=torch.float64
    )  # over 120 degrees at the last corner
    assert torch.equal(geometric_centre(blunt), blunt[2])
    square = torch.tensor([[0.0, 0.0], [4.0, 3.0], [4.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(geometric_centre(square), torch.tensor([2.0, 1.5], dtype=torch.float64))


@few
@given(seed=seeds, offset=some.sampled_from([0.0, 1e6]))
def test_where_a_whole_segment_is_best_its_middle_is_taken(seed: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(5, generator=generator, dtype=torch.float64)
    places = torch.randn(6, generator=generator, dtype=torch.float64).sort().values
    rows = places[:, None] * direction + offset
    torch.testing.assert_close(geometric_centre(rows), rows[2:4].mean(0), rtol=0, atol=1e-7)


def test_what_more_than_half_agree_on_is_the_geometric_median_to_the_bit() -> None:
    few, shared = cohort(5, 4), cohort(6, 1)[0]
    tensors = [*few, *[shared] * 5]
    assert same(made("geometric_median")(tensors, even(tensors)), shared)


@few
@given(seed=seeds, clients=some.integers(1, 9), radius=some.floats(0.01, 10))
def test_the_radius_bounds_the_step_and_leaves_short_updates_alone(seed: int, clients: int, radius: float) -> None:
    tensors, around = cohort(seed, clients), cohort(seed + 1, 1)[0]
    found = vector(made("clipped_mean", radius=radius)(tensors, even(tensors), around)) - vector(around)
    changes = [vector(part) - vector(around) for part in tensors]
    expected = sum(change if change.norm() <= radius else change * (radius / change.norm()) for change in changes)
    torch.testing.assert_close(found, expected / clients, rtol=0, atol=1e-5)
    assert found.norm() <= radius * (1 + 1e-6) + 1e-6


def test_a_clipped_mean_by_hand() -> None:
    parts = [{"x": torch.tensor([3.0]), "y": torch.tensor([4.0])}, {"x": torch.tensor([0.0]), "y": torch.tensor([0.5])}]
    around = {"x": torch.tensor([0.0]), "y": torch.tensor([0.0])}
    found = made("clipped_mean", radius=1.0)(parts, [0.5, 0.5], around)  # (0.6, 0.8) and (0, 0.5)
    torch.testing.assert_close(vector(found), torch.tensor([0.3, 0.65], dtype=torch.float64))


@pytest.mark.parametrize("around", [None, {}, {"x": torch.zeros(2)}, {"y": torch.zeros(1)}])
def test_without_a_centre_of_the_right_shape_updates_are_clipped_around_the_median(around: Tensors | None) -> None:
    tensors = column(0.0, 1.0, 5.0)  # around 1: -1, 0 and 4, shortened to -1, 0 and 2
    found = made("clipped_mean", radius=2.0)(tensors, even(tensors), around)
    assert found["x"].tolist() == pytest.approx([4 / 3])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("median", 2.0),
        ("trimmed_mean", 2.0),
        ("krum", 1.0),
        ("multi_krum", 2.0),
        ("geometric_median", 2.0),
        ("clipped_mean", 2.0),
    ],
)
def test_two_clients(name: str, expected: float) -> None:
    for tensors in permutations(column(1.0, 3.0)):
        assert made(name)(tensors, [0.9, 0.1])["x"].item() == expected


@pytest.mark.parametrize("name", ["mean", *ROBUST])
def test_types_shapes_and_order_of_names_survive(name: str) -> None:
    tensors = [
        {
            "scalar": torch.tensor(float(number)),
            "half": torch.full((2, 1), float(number), dtype=torch.bfloat16),
            "double": torch.full((1,), float(number), dtype=torch.float64),
            "empty": torch.zeros(0, 4),
        }
        for number in (1, 2, 3)
    ]
    found = made(name, radius=100.0)(tensors, even(tensors))
    assert list(found) == list(tensors[0])
    for key, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (tensors[0][key].dtype, tensors[0][key].shape)
    assert float(found["scalar"]) == pytest.approx(1.0 if name == "krum" else 2.0)


@pytest.mark.parametrize("name", ROBUST)
def test_where_nobody_or_nothing_takes_part_a_rule_is_the_weighted_mean(name: str) -> None:
    tensors = cohort(1, 3)
    assert same(made(name)(tensors, [0.0] * 3), weighted_mean(tensors, [0.0] * 3))
    assert made(name)([{}, {}], [0.5, 0.5]) == {}
    lost = column(math.nan, math.inf)
    assert made(name)(lost, [0.5, 0.5])["x"].isnan().all()


@pytest.mark.parametrize("name", ROBUST)
def test_cohorts_that_cannot_be_combined_are_refused(name: str) -> None:
    with pytest.raises(ContractError, match="at least one upload"):
        made(name)([], [])
    for other in ({"x": torch.zeros(2)}, {"y": torch.zeros(1)}, {}):
        with pytest.raises(ContractError, match="same names and shapes"):
            made(name)([{"x": torch.zeros(1)}, other], [0.5, 0.5])
