"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from fedprompt.metrics.accuracy import ClientResult, conclude, pack_hits, summarise, unpack_hits
from fedprompt.metrics.calibration import BINS, calibration_error
from fedprompt.metrics.scoring import entropy, score

pytestmark = pytest.mark.unit


def result(samples: int, correct: int, domains: dict[str, list[int]] | None = None) -> ClientResult:
    bins = [[0.0, 0.0, 0.0] for _ in range(BINS)]
    bins[-1] = [float(samples), float(samples), float(correct)]
    return ClientResult(samples, correct, 1.0 * samples, 0.0, 0.0, bins, domains or {})


def test_average_is_unweighted_and_pooled_is_weighted_by_samples() -> None:
    found = summarise([result(10, 10), result(90, 45)])
    assert found["average"] == pytest.approx(0.75)
    assert found["pooled"] == pytest.approx(0.55)
    assert found["worst"] == 0.5


@given(some.lists(some.tuples(some.integers(1, 50), some.floats(0, 1)), min_size=1, max_size=30))
def test_worst_is_at_most_the_bottom_decile_and_that_at_most_the_average(clients: list[tuple[int, float]]) -> None:
    found = summarise([result(n, round(n * share)) for n, share in clients])
    assert found["worst"] <= found["bottom_decile"] + 1e-12
    assert found["bottom_decile"] <= found["average"] + 1e-12


def test_the_bottom_decile_of_twenty_clients_is_the_mean_of_two() -> None:
    found = summarise([result(20, correct) for correct in range(1, 21)])
    assert found["bottom_decile"] == pytest.approx((1 + 2) / 2 / 20)


def test_domains_are_pooled_over_clients() -> None:
    found = summarise([result(4, 2, {"a": [4, 2]}), result(8, 8, {"a": [4, 4], "b": [4, 4]})])
    assert found["domains"] == {"a": 6 / 8, "b": 1.0}


def test_calibration_error_by_hand() -> None:
    bins = [[10.0, 3.0, 4.0], [30.0, 24.0, 18.0], [0.0, 0.0, 0.0]]
    assert calibration_error(bins) == pytest.approx(1 / 40 + 6 / 40)


def test_the_summary_of_a_run_averages_the_last_rounds_after_taking_each_minimum() -> None:
    base = summarise([result(10, 5)])
    rounds = [
        {**base, "round": r, "average": a, "worst": w} for r, a, w in [(1, 0.9, 0.1), (2, 0.5, 0.4), (3, 0.7, 0.2)]
    ]
    found = conclude(rounds, last=2)
    assert (found["average"], found["worst"]) == (pytest.approx(0.6), pytest.approx(0.3))
    assert (found["best_average"], found["best_round"], found["final_average"]) == (0.9, 1, 0.7)


def test_draws_are_averaged_in_probability_space_not_in_logits() -> None:
    draws = torch.tensor([[[0.999, 0.001]], [[0.24, 0.76]], [[0.24, 0.76]]])
    assert draws.log().mean(0).argmax(-1).item() == 0  # averaged logits would say class 0
    assert score(draws, torch.tensor([1]), np.zeros(1, int), ["all"]).correct == 1


def test_mutual_information_is_zero_when_draws_agree_and_ln_two_when_they_are_sure_and_differ() -> None:
    same = torch.tensor([[[0.6, 0.4]], [[0.6, 0.4]]])
    differ = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    where = np.zeros(1, int)
    assert score(same, torch.tensor([0]), where, ["all"]).mutual_information == pytest.approx(0, abs=1e-12)
    assert score(differ, torch.tensor([0]), where, ["all"]).mutual_information == pytest.approx(math.log(2))


def test_entropy_of_a_sure_prediction_is_zero_and_of_a_uniform_one_ln_c() -> None:
    assert entropy(torch.tensor([1.0, 0.0, 0.0])).item() == 0
    assert entropy(torch.full((5,), 0.2)).item() == pytest.approx(math.log(5))


def test_counts_by_domain_and_bin() -> None:
    draws = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [0.1, 0.9]]])
    found = score(draws, torch.tensor([0, 0, 0]), np.array([0, 1, 1]), ["photo", "sketch"])
    assert found.domains == {"photo": [1, 1], "sketch": [2, 1]}
    assert found.bins[BINS - 1] == [1.0, 1.0, 1.0]
    assert found.bins[int(0.9 * BINS)][0] == 1
    assert found.nll == pytest.approx(-math.log(0.5) - math.log(0.1))


def test_which_images_are_right_is_one_bit_each_in_the_order_of_the_images() -> None:
    draws = torch.eye(3)[[0, 1, 2, 0, 0, 1, 2, 2, 1]].unsqueeze(0)
    labels = torch.tensor([0, 1, 0, 0, 1, 1, 2, 0, 1])
    found = score(draws, labels, np.zeros(9, dtype=int), ["only"])
    assert found.hits is not None
    assert unpack_hits(found.hits, 9).tolist() == [True, True, False, True, False, True, True, False, True]
    assert found.correct == 6


@given(some.lists(some.booleans(), max_size=200))
def test_packed_hits_come_back_and_six_images_take_one_character(right: list[bool]) -> None:
    text = pack_hits(np.array(right, dtype=bool))
    assert unpack_hits(text, len(right)).tolist() == right
    assert len(text) <= len(right) / 6 + 4


@pytest.mark.parametrize(("text", "samples"), [("/w==", 7), ("/w==", 9), ("?", 8), ("", 1)])
def test_hits_that_are_not_one_bit_an_image_are_refused(text: str, samples: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack_hits(text, samples)


def test_a_result_without_hits_is_written_as_before() -> None:
    assert "hits" not in ClientResult(3, 2).to_json()
    assert ClientResult(**ClientResult(3, 2, hits="wA==").to_json()).hits == "wA=="
