"""Late updates: the maths by itself, and whole runs whose messages are held back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from remote_run import Recorder, kept_tensors, run_remotely, tiny_settings
from support import StopAfter, Stopped, shared_tensors, worst_difference

from fedprompt import config as configuration
from fedprompt.core.messages import Failure, LocalUpdate
from fedprompt.engines.remote.protocol import Answer, Order
from fedprompt.errors import ConfigError, QuorumError
from fedprompt.federation.staleness import decay, rebased
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

SLOW, ROUND, ROUNDS = 1, 2, 4  # who is late, with the order of which round, of how many
ROUNDED = 1e-5

shares = some.floats(0, 1)
rounds = some.integers(0, 50)


@given(shares, rounds, rounds)
def test_the_weight_decays_with_every_round_and_by_the_same_share(share: float, first: int, more: int) -> None:
    assert decay(share, 0) == 1
    assert 0 <= decay(share, first + more) <= decay(share, first) <= 1
    assert decay(share, first + more) == pytest.approx(decay(share, first) * decay(share, more))
    assert decay(1.0, first) == 1
    assert decay(0.0, first + 1) == 0


@settings(max_examples=50)
@given(some.integers(0, 2**16), some.integers(1, 9))
def test_a_late_update_is_the_same_step_from_todays_model(seed: int, late: int) -> None:
    stream = torch.Generator().manual_seed(seed)
    before, after, today = (torch.randn(3, 4, generator=stream) for _ in range(3))
    counts = torch.tensor([3, 4])
    reply = LocalUpdate(0, 5, {"a": after, "n": counts}, 9, late=late, started={"a": before, "n": counts})
    moved = rebased(reply, {"a": today, "n": counts})
    assert torch.allclose(moved.upload["a"] - today, after - before, atol=1e-6)
    assert moved.upload["n"] is counts, "a statistic stays what it is"
    assert rebased(replace(reply, late=0), {"a": today}).upload["a"] is after
    assert torch.equal(rebased(reply, {"a": before}).upload["a"], after), "nothing changed meanwhile"


def test_an_update_of_another_shape_stays_as_it_is_and_is_left_to_the_guard() -> None:
    reply = LocalUpdate(0, 5, {"a": torch.ones(2)}, 9, late=1, started={"a": torch.ones(3)})
    assert torch.equal(rebased(reply, {"a": torch.ones(3)}).upload["a"], torch.ones(2))


class Delayed(Recorder):
    """Holds back the answer of one client to one order, until it was asked for it so many times."""

    def __init__(self, asked: int = 1, spoilt: bool = False) -> None:
        super().__init__()
        self._asked, self._spoilt = asked, spoilt
        self._held: dict[int, bytes] = {}
        self.begged: list[int] = []

    def deliver(self, orders: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes | Failure]]:
        listed = list(orders)
        fresh = [(client, order) for client, order in listed if order is not None]
        meant = dict(fresh)
        for client, order in listed:
            if order is not None:
                continue
            self.begged.append(client)
            if len(self.begged) < self._asked:
                yield client, Failure(client, "deadline", "must answer within 5 s")
            else:
                yield client, self._held.pop(client)
        for client, came in super().deliver(fresh):
            assert isinstance(came, bytes)
            if (client, Order.from_bytes(meant[client]).train) == (SLOW, ROUND):
                self._held[client] = self._spoil(came) if self._spoilt else came
                yield client, Failure(client, "deadline", "must answer within 5 s")
            else:
                yield client, came

    @staticmethod
    def _spoil(blob: bytes) -> bytes:
        answer = Answer.from_bytes(blob)
        from fedprompt.core import wire

        reply = wire.unpack(answer.packed, 10**9)
        upload = {name: tensor * torch.nan for name, tensor in reply.upload.items()}
        return replace(answer, packed=wire.pack(replace(reply, upload=upload))).to_bytes()


def run_late(folder: Path, post: Recorder, name: str = "late", **federation: Any) -> Run:
    return run_remotely(
        tiny_settings(folder, name, federation={"rounds": ROUNDS, "evaluate_every": ROUNDS, **federation}), post
    )


def incidents(run: Run) -> list[tuple[int, int | None, str]]:
    return [(round, client, kind) for round, client, kind, _ in run.reader.events() if kind in ("refused", "late")]


def trained(post: Recorder, round: int) -> dict[int, tuple[Order, LocalUpdate]]:
    """The orders to train in a round and their answers, by client."""
    orders = {client: Order.from_bytes(blob) for client, blob in post.orders}
    found = {}
    for (client, blob), (who, came) in zip(_by_client(post.orders), _by_client(post.answers), strict=True):
        assert client == who
        order, reply = Order.from_bytes(blob), Answer.from_bytes(came).reply(10**9)
        if order.train == round and reply is not None:
            found[client] = (order, reply)
    assert orders
    return found


def _by_client(messages: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return sorted(messages, key=lambda each: each[0])  # stable: those of a client stay in their order


def average(parts: list[tuple[Tensors, float]]) -> Tensors:
    total = sum(weight for _, weight in parts)
    return {
        name: sum(part[name].double() * weight for part, weight in parts).div(total).float() for name in parts[0][0]
    }


@pytest.fixture(scope="module")
def in_time_only(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of today: the late update is dropped."""
    return run_late(tmp_path_factory.mktemp("today"), Delayed())


def test_without_staleness_a_late_update_is_dropped_as_ever(in_time_only: Run, tmp_path: Path) -> None:
    post = Delayed()
    run = run_late(tmp_path, post, staleness=0.0)
    assert post.begged == []
    assert incidents(run) == [(ROUND, SLOW, "refused")]
    assert worst_difference(shared_tensors(run), shared_tensors(in_time_only)) == 0
    assert "staleness" not in run.config.model_dump(mode="json")["federation"], "older run files stay what they are"


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_late_update_counts_in_the_next_round_with_its_share(share: float, tmp_path: Path) -> None:
    post = Delayed()
    run = run_late(tmp_path, post, staleness=share)
    assert post.begged == [SLOW]
    assert incidents(run) == [(ROUND, SLOW, "refused"), (ROUND + 1, SLOW, "late")]
    now, then = trained(post, ROUND + 1), trained(post, ROUND)
    assert SLOW not in now, "who is late gets no other order meanwhile"
    today = next(iter(now.values()))[0].received
    order, late = then[SLOW]
    moved = {name: today[name] + late.upload[name] - order.received[name] for name in late.upload}
    parts = [(reply.upload, float(reply.samples)) for _, reply in now.values()] + [(moved, share * late.samples)]
    following = next(iter(trained(post, ROUND + 2).values()))[0].received
    assert worst_difference(average(parts), {name: following[name] for name in moved}) <= ROUNDED


def test_a_share_near_nothing_is_nearly_the_run_without_it(tmp_path: Path) -> None:
    """The model after the round in which it counts: later rounds differ, since the site itself has learnt something."""
    almost, never = Delayed(), Delayed(asked=99)
    run_late(tmp_path, almost, staleness=1e-9)
    run_late(tmp_path, never, name="never", staleness=1e-9, late_rounds=9)
    first, second = (next(iter(trained(post, ROUND + 2).values()))[0].received for post in (almost, never))
    assert worst_difference(first, second) <= ROUNDED


def test_what_a_late_client_keeps_goes_on_from_its_late_round(tmp_path: Path) -> None:
    post = Delayed()
    run = run_late(tmp_path, post, staleness=0.5)
    (late, _), (after, _) = trained(post, ROUND)[SLOW], trained(post, ROUND + 2)[SLOW]
    assert after.state == after.committed == late.keep_as
    assert kept_tensors(run, SLOW) is not None


def test_a_client_that_never_answers_begins_anew(tmp_path: Path) -> None:
    post = Delayed(asked=99)
    run = run_late(tmp_path, post, staleness=0.5, late_rounds=1)
    assert post.begged == [SLOW]
    assert incidents(run) == [(ROUND, SLOW, "refused"), (ROUND + 1, SLOW, "refused")]
    assert SLOW in trained(post, ROUND + 2)


def test_it_may_be_later_than_one_round(tmp_path: Path) -> None:
    post = Delayed(asked=2)
    run = run_late(tmp_path, post, staleness=0.5)
    assert incidents(run)[-1] == (ROUND + 2, SLOW, "late")
    detail = next(detail for *_, kind, detail in run.reader.events() if kind == "late")
    assert detail == "2 rounds late: counts with 0.25 of its weight"


def test_with_an_evaluation_in_every_round_it_is_untested_while_it_works(tmp_path: Path) -> None:
    post = Delayed()
    run = run_late(tmp_path, post, staleness=0.5, evaluate_every=1)
    assert incidents(run) == [(ROUND, SLOW, "refused"), (ROUND + 1, SLOW, "late")]
    untested = [(round, client) for round, client, kind, _ in run.reader.events() if kind == "untested"]
    assert untested == [(ROUND - 1, SLOW), (ROUND, SLOW)]
    assert SLOW in run.evaluations(ROUNDS)


def test_a_late_update_is_guarded_like_any_other(in_time_only: Run, tmp_path: Path) -> None:
    post = Delayed(spoilt=True)
    run = run_late(tmp_path, post, staleness=0.5)
    assert incidents(run) == [(ROUND, SLOW, "refused"), (ROUND + 1, SLOW, "refused")]
    assert all(tensor.isfinite().all() for tensor in shared_tensors(run).values())


def test_it_counts_also_when_its_client_is_not_drawn_again(tmp_path: Path) -> None:
    post = Delayed()
    run = run_late(tmp_path, post, staleness=0.5, away={"client_1": [ROUND + 1, ROUNDS]})
    assert incidents(run) == [(ROUND, SLOW, "refused"), (ROUND + 1, SLOW, "late")]
    assert SLOW not in run.rounds()[ROUND + 1].cohort


class Alone(Delayed):
    """In the round after, nobody but the client who is late answers."""

    def deliver(self, orders: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes | Failure]]:
        listed = list(orders)
        fresh = {client: Order.from_bytes(order) for client, order in listed if order is not None}
        for client, came in super().deliver(listed):
            cut = client in fresh and fresh[client].train == ROUND + 1
            yield client, Failure(client, "absent", "is gone") if cut else came


def test_late_updates_of_others_are_no_quorum_of_a_cohort(tmp_path: Path) -> None:
    """One site that held its update back was the whole next round, with its full weight, since weights add up to 1."""
    late = {"staleness": 0.1, "rounds": ROUNDS, "evaluate_every": ROUNDS, "away": {"client_1": [ROUND + 1, ROUNDS]}}
    with pytest.raises(QuorumError):
        run_remotely(tiny_settings(tmp_path, "alone", federation=late, guard={"quorum": 0.3}), Alone())


def test_a_resumed_run_waits_no_longer_and_its_site_begins_anew(tmp_path: Path) -> None:
    settings = tiny_settings(
        tmp_path, "late", federation={"rounds": ROUNDS, "evaluate_every": ROUNDS, "staleness": 0.5}
    )
    before, after = Delayed(asked=99), Recorder()
    with pytest.raises(Stopped):
        run_remotely(settings, before, StopAfter(ROUND))
    run = run_remotely(settings, after)
    assert incidents(run) == [(ROUND, SLOW, "refused")]
    (first, _), (again, _) = trained(before, ROUND - 1)[SLOW], trained(after, ROUND + 1)[SLOW]
    assert again.state == again.committed == first.keep_as, "what it keeps is of its last round that counted"
    assert [each.round for each in run.rounds()] == list(range(ROUNDS + 1))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"privacy": {"noise": 1.0, "clip": 0.1}}, "privacy must be absent with federation.staleness above 0"),
        ({"aggregation": {"rule": "median"}}, "aggregation must have rule: mean with federation.staleness above 0"),
        ({"federation": {"staleness": 0.5, "secure_sum": True}}, "have staleness: 0 with secure_sum"),
        ({"federation": {"staleness": 1.5}}, "federation.staleness must"),
        ({"federation": {"staleness": 0.5, "late_rounds": 0}}, "federation.late_rounds must"),
    ],
)
def test_what_cannot_be_late_is_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        configuration.parse({"federation": {"staleness": 0.5}, **section})
