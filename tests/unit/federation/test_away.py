"""Clients that miss rounds, by chance or by plan, and come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from support import StopAfter, Stopped, content, experiment, run

from fedprompt import config
from fedprompt.config import config_files
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.errors import ConfigError
from fedprompt.methods.coop import CoOp
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit


@pytest.fixture
def dual(settings: Any) -> Any:
    def make(method: str = "promptfl", **changes: Any) -> dict[str, Any]:
        federation = {"rounds": 5, "evaluate_last": 5, **changes.pop("federation", {})}
        chosen = {"name": method, "context_tokens": 2}
        return settings(**{"backbone": {"name": "tiny-clip"}, "method": chosen, "federation": federation, **changes})

    return make


AWAY = {"away": {"client_1": [2, 4]}}


@given(some.integers(2, 12), some.floats(0.05, 1), some.integers(0, 5), some.integers(1, 20), some.data())
def test_nobody_else_is_picked_or_dropped_because_some_are_away(
    count: int, fraction: float, seed: int, round: int, data: Any
) -> None:
    clients = list(range(count))
    away = data.draw(some.sets(some.sampled_from(clients), max_size=count - 1))
    usual = sample_cohort(seed, round, clients, fraction)
    cohort = sample_cohort(seed, round, clients, fraction, away)
    assert cohort
    assert not away & set(cohort)
    assert cohort == sorted(set(usual) - away) or (set(usual) <= away and len(cohort) == 1)


def test_a_client_that_is_away_does_not_train_and_is_evaluated_all_the_same(dual: Any) -> None:
    done = run(dual(federation=AWAY))
    cohorts = {record.round: record.cohort for record in done.rounds()}
    assert cohorts == {0: [], 1: [0, 1, 2, 3], 2: [0, 2, 3], 3: [0, 2, 3], 4: [0, 2, 3], 5: [0, 1, 2, 3]}
    for round in range(1, 6):
        assert set(done.client_accuracies(round)) == {"client_0", "client_1", "client_2", "client_3"}
    sent = {record.round: record.bytes_up for record in done.rounds()}
    assert sent[3] * 4 == sent[5] * 3


@pytest.mark.parametrize("method", ["promptfl", "coop"])
def test_its_state_is_the_same_bytes_while_it_is_away(method: str, dual: Any) -> None:
    values = dual(method, federation=AWAY)
    states, rounds = [], []
    for stop in (1, 3, 4):
        with pytest.raises(Stopped):
            run(values, observer=StopAfter(stop), resume=True)
        found = {client: (round, blob) for client, round, blob in Run(_directory(values)).reader.client_states()}
        states.append(found[1][1])
        rounds.append((found[1][0], found[0][0]))
    assert states[0] == states[1] == states[2]
    assert rounds == [(1, 1), (1, 3), (1, 4)]
    done = run(values, resume=True)
    after = {client: (round, blob) for client, round, blob in done.reader.client_states()}
    assert after[1][0] == 5
    assert (after[1][1] != states[0]) == (method == "coop")  # PromptFL keeps nothing
    assert content(done) == content(run({**values, "name": "whole"}))


def _directory(values: Any) -> Any:
    return config.parse(values).run_directory


def test_clients_that_share_nothing_do_not_notice_that_another_is_away(dual: Any) -> None:
    alone = {"engine": {"cohort": 1}}  # in a batch with others the last bits depend on who they are
    with_it, without = (
        run(dual("coop", name="present", **alone)),
        run(dual("coop", name="away", federation=AWAY, **alone)),
    )
    for client in (0, 2, 3):
        assert with_it.reader.client_state(client) == without.reader.client_state(client)
        for round in range(1, 6):
            assert with_it.reader.evaluations(round)[client] == without.reader.evaluations(round)[client]
    assert with_it.reader.client_state(1) != without.reader.client_state(1)


def test_the_shared_context_is_that_of_the_clients_that_are_there(dual: Any) -> None:
    with_it, without = run(dual(name="present")), run(dual(name="away", federation=AWAY))
    assert with_it.reader.evaluations(1) == without.reader.evaluations(1)
    assert with_it.reader.server_state() != without.reader.server_state()


@pytest.mark.parametrize(
    ("away", "message"),
    [
        ({"nobody": [1, 2]}, r"federation\.away must name clients of the partition \(client_0, .*\), got 'nobody'"),
        ({"client_0": [6, 7]}, r"federation\.away\.client_0 must begin within the 5 rounds, got 6"),
        ({f"client_{k}": [k + 1, 4] for k in range(4)}, r"leave a client to train in every round, got 'none in 4'"),
    ],
)
def test_an_absence_the_federation_cannot_have_is_refused(away: dict, message: str, dual: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        run(dual(federation={"away": away}))


def test_a_client_that_is_held_out_cannot_be_away(dual: Any) -> None:
    values = dual(federation={"held_out": 0.25})
    (held,) = experiment(values).factory.prepare()[3].newcomers
    with pytest.raises(ConfigError, match="must name clients that are not held out of training"):
        run(dual(federation={"held_out": 0.25, "away": {f"client_{held}": [1, 2]}}))


@pytest.mark.parametrize(
    ("away", "message"),
    [
        ({"a": [3, 2]}, r"federation\.away must give the first round before the last one \(a has 3 and 2\)"),
        ({"a": [0, 2]}, r"federation\.away\.a\.0 must be greater than or equal to 1, got 0"),
        ({"a": [2]}, r"federation\.away\.a\.1 must be given"),
        ({"a": 2}, r"federation\.away\.a must be"),
        (["a"], r"federation\.away must be"),
    ],
)
def test_an_absence_has_a_first_and_a_last_round(away: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.parse({"federation": {"away": away}})


def test_an_absence_is_part_of_what_is_computed() -> None:
    plain, away = config.parse({}), config.parse({"federation": AWAY})
    assert plain.digest() != away.digest()
    assert config_files.apply_overrides({}, ["federation.away.client_1=[2, 4]"]) == {"federation": AWAY}


def test_with_half_of_the_clients_a_round_those_never_picked_are_evaluated_from_the_first(dual: Any) -> None:
    done = run(dual(federation={"fraction": 0.5, "rounds": 1}))
    assert len(done.rounds()[1].cohort) == 2
    assert len(done.client_accuracies(1)) == 4
    own = run(dual("coop", name="own", federation={"fraction": 0.5, "rounds": 1}), CoOp(context_tokens=2))
    assert len(own.client_accuracies(1)) == 4
    assert len(list(own.reader.client_states())) == 2
