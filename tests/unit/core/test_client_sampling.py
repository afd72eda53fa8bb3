"""Who is picked: the same clients as ever for equal seeds, without a look at those who are not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import support
from hypothesis import given
from hypothesis import strategies as st

from fedprompt.config import AttackConfig
from fedprompt.core.client_sampling import cohort_size, sample_attackers, sample_cohort, sample_newcomers, sample_tested
from fedprompt.core.method import World, without
from fedprompt.random_streams import SERVER, stream
from fedprompt.report import comparison_table
from fedprompt.report.run_details import clients_of

pytestmark = pytest.mark.unit


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# cohorts of eight rounds with two seeds, as the streams of edition 2 first drew them
KNOWN: list[tuple[dict[str, Any], str]] = [
    ({"clients": range(100), "fraction": 0.1}, "8e816e660acc7b31"),
    ({"clients": range(1000), "fraction": 0.02, "attempt": 1}, "25c8466f70173a91"),
    ({"clients": range(0, 500, 3), "fraction": 0.1}, "eab2350c0d206ec1"),
    ({"clients": range(100), "fraction": 0.2, "away": set(range(0, 100, 2))}, "ddd2f4cdbc5b9d3a"),
    ({"clients": range(20), "fraction": 0.1, "away": set(range(19))}, "bdb411211f525bfc"),
    ({"clients": range(300), "fraction": 0.05, "poisson": True}, "f29d9c6debdbf816"),
    (
        {"clients": range(1, 300, 2), "fraction": 0.3, "poisson": True, "away": {3, 5, 7, 9, 11, 101}},
        "ab60a10a7bb9972d",
    ),
]


@pytest.mark.parametrize(("arguments", "known"), KNOWN)
def test_cohorts_are_what_they_were(arguments: dict[str, Any], known: str) -> None:
    assert digest([sample_cohort(seed, round, **arguments) for seed in (0, 5) for round in range(1, 9)]) == known


def test_attackers_and_newcomers_are_who_they_were() -> None:
    attack = AttackConfig(kind="sign_flip", fraction=0.3)
    assert digest(sorted(sample_attackers(attack, 2, range(50)))) == "37446c69d71d3339"
    assert digest(sorted(sample_attackers(attack, 2, range(0, 900, 7)))) == "1378535ea94e84fd"
    assert digest(sorted(sample_newcomers(1, 200, 0.2))) == "979099fe441f5941"


@given(st.integers(1, 40), st.floats(0.01, 1), st.sets(st.integers(0, 40)), st.integers(0, 5))
def test_a_cohort_is_the_beginning_of_one_draw_without_those_away(
    count: int, fraction: float, away: set[int], seed: int
) -> None:
    order = stream(seed, 1, SERVER, "cohort").permutation(count).tolist()
    present = [client for client in order if client not in away]
    places = [client for client in order[: cohort_size(fraction, count)] if client not in away]
    assert sample_cohort(seed, 1, range(count), fraction, away) == sorted(places or present[:1])


def world(clients: int, newcomers: set[int]) -> World:
    return World(8, 2, 5, 4, ("a",), [f"c{number}" for number in range(clients)], frozenset(newcomers))


@given(st.integers(1, 30), st.sets(st.integers(0, 29)))
def test_participants_are_all_that_are_not_held_out(clients: int, newcomers: set[int]) -> None:
    found = world(clients, newcomers).participants
    assert list(found) == [client for client in range(clients) if client not in newcomers]


def test_participants_are_made_once_and_cost_nothing_where_nobody_is_held_out() -> None:
    everyone, some = world(10**6, set()), world(10, {3})
    assert everyone.participants == range(10**6)
    assert some.participants is some.participants
    assert without(range(5), ()) == range(5)


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 5))
def test_tested_clients_are_so_many_different_ones_in_order(clients: int, count: int, seed: int) -> None:
    everyone = range(0, 3 * clients, 3)
    found = sample_tested(seed, everyone, count)
    assert len(found) == min(count, clients)
    assert sorted(set(found)) == list(found)
    assert set(found) <= set(everyone)
    assert list(sample_tested(seed, everyone, count)) == list(found)


def test_tested_clients_change_with_the_seed_and_are_all_without_a_number() -> None:
    assert sample_tested(0, range(100), 10) != sample_tested(1, range(100), 10)
    assert sample_tested(0, range(100), None) == range(100)


def examined(run: Any) -> list[list[int]]:
    """The clients of every evaluated round."""
    return [list(run.evaluations(entry["round"])) for entry in run.history()]


def test_a_run_evaluates_the_same_drawn_clients_in_every_round_and_says_so(settings: Callable[..., Any]) -> None:
    federation = {"rounds": 3, "evaluate_last": 3, "evaluate_clients": 2}
    done = support.run(settings(federation=federation))
    expected = list(sample_tested(0, range(4), 2))
    assert examined(done) == [expected] * 3
    assert len(done.client_accuracies()) == 2
    assert clients_of(done) == "4; 2 of them, drawn once, are evaluated for all"
    assert "Clients that are evaluated for all, drawn once: fedvpt: 2" in comparison_table.notes(
        comparison_table.comparison([done])
    )


def test_fewer_tested_clients_change_nothing_else(settings: Callable[..., Any]) -> None:
    few = support.run(settings(name="few", federation={"evaluate_clients": 1}))
    everyone = support.run(settings(name="everyone", federation={"evaluate_clients": 99}))
    assert examined(everyone) == [[0, 1, 2, 3]] * 2
    assert clients_of(everyone) == "4"
    assert few.reader.server_state() == everyone.reader.server_state()
    (client,) = examined(few)[0]
    assert few.evaluations(2)[client] == everyone.evaluations(2)[client]


def test_tested_clients_are_drawn_from_those_held_out_and_from_the_honest(settings: Callable[..., Any]) -> None:
    partition = {"scheme": "iid", "clients": 8}
    held = support.run(settings(name="held", partition=partition, federation={"held_out": 0.5, "evaluate_clients": 2}))
    assert examined(held)[-1] == list(sample_tested(0, sorted(sample_newcomers(0, 8, 0.5)), 2))
    assert clients_of(held) == "8; only 2 of those held out of training are evaluated"
    attack = {"kind": "sign_flip", "fraction": 0.5}
    attacked = support.run(
        settings(name="attacked", partition=partition, attack=attack, federation={"evaluate_clients": 3})
    )
    attackers = sample_attackers(AttackConfig(**attack), 0, range(8))
    assert examined(attacked)[-1] == list(sample_tested(0, without(range(8), attackers), 3))
