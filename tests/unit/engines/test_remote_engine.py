"""Clients elsewhere that do not do as they should: the round goes on without them, and the run file says who and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_run import (
    Recorder,
    assert_same_as_in_process,
    assert_same_figures,
    kept_tensors,
    run_remotely,
    tiny_settings,
)
from safetensors.torch import save
from support import run as run_here
from support import shared_tensors, worst_difference

from fedprompt.client.client_states import ClientStates
from fedprompt.core import wire
from fedprompt.core.messages import COHORT, Download, Failure, LocalUpdate, Training
from fedprompt.engines import kinds
from fedprompt.engines.framing import Frame
from fedprompt.engines.in_process import InProcess
from fedprompt.engines.remote.protocol import LONGEST_TEXT, Answer, Order, Setting
from fedprompt.engines.remote.remote_engine import ENVELOPE, Remote
from fedprompt.errors import QuorumError
from fedprompt.federation.loop import Observer
from fedprompt.runs.run import Run
from fedprompt.runs.store import REFUSED, UNTESTED, WARNING
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

LIAR, ROUND = 1, 2  # who misbehaves, and when: in an answer that has the evaluation of round 1 too
Came = bytes | Failure
Tamper = Callable[[bytes], Came]


class Tampering(Recorder):
    """Carries messages, and changes the answer of one client to the orders of one round of training."""

    def __init__(self, tamper: Tamper, round: int | None = ROUND, times: int = 100) -> None:
        super().__init__()
        self._tamper, self._round, self._times = tamper, round, times

    def deliver(self, orders: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Came]]:
        waiting = list(orders)
        meant = dict(waiting)
        for client, came in super().deliver(waiting):
            order = Order.from_bytes(meant[client])
            if (client, order.train) == (LIAR, self._round) and order.kind != "meet" and self._times:
                self._times -= 1
                assert isinstance(came, bytes)
                yield client, self._tamper(came)
            else:
                yield client, came


def unpacked(blob: bytes) -> tuple[Answer, LocalUpdate]:
    answer = Answer.from_bytes(blob)
    reply = answer.reply(10**9)
    assert reply is not None
    return answer, reply


def packed(reply: LocalUpdate, **values: Any) -> bytes:
    """A reply as bytes, without a look at what it says."""
    told = {"client": reply.client, "round": reply.round, "samples": reply.samples, "loss": reply.loss, **values}
    return save(reply.upload, {"fedprompt-reply-1": json.dumps(told)})


def saying(**values: Any) -> Tamper:
    """The same update with another claim beside it."""

    def tamper(blob: bytes) -> bytes:
        answer, reply = unpacked(blob)
        return replace(answer, packed=packed(reply, **values)).to_bytes()

    return tamper


def sending(change: Callable[[Tensors], Tensors]) -> Tamper:
    """Another update."""

    def tamper(blob: bytes) -> bytes:
        answer, reply = unpacked(blob)
        return replace(answer, packed=packed(replace(reply, upload=change(reply.upload)))).to_bytes()

    return tamper


def figures(**values: Any) -> Tamper:
    """The same update with other figures of the evaluation."""

    def tamper(blob: bytes) -> bytes:
        frame = Frame.from_bytes(blob)
        header = {**frame.header, "result": {**frame.header["result"], **values}}
        return Frame(header, frame.tensors).to_bytes()

    return tamper


def complaining(blob: bytes) -> bytes:
    """A failure with a megabyte of text."""
    frame = Frame.from_bytes(blob)
    return Frame({**frame.header, "failure": ["story", "y" * 10**6]}).to_bytes()


TAMPERED: dict[str, tuple[Tamper, str]] = {
    "NaN": (sending(lambda upload: {"prompt": upload["prompt"] * torch.nan}), "finite"),
    "infinity": (sending(lambda upload: {"prompt": upload["prompt"] / 0}), "finite"),
    "wrong shape": (sending(lambda upload: {"prompt": upload["prompt"][:, 1:].clone()}), "shapes"),
    "wrong dtype": (sending(lambda upload: {"prompt": upload["prompt"].half()}), "dtypes"),
    "nothing": (sending(lambda upload: {}), "keys"),
    "a local tensor": (sending(lambda upload: {**upload, "head.weight": torch.zeros(2)}), "keys"),
    "an unknown tensor": (sending(lambda upload: {**upload, "more": torch.zeros(2)}), "keys"),
    "more than declared": (sending(lambda upload: {**upload, "more": torch.zeros(10**4)}), "bytes"),
    "a megabyte": (sending(lambda upload: {**upload, "more": torch.zeros(ENVELOPE // 3)}), "message"),
    "ten megabytes": (sending(lambda upload: {**upload, "more": torch.zeros(10 * ENVELOPE // 4)}), "bytes"),
    "no images": (saying(samples=0), "samples"),
    "images it owes": (saying(samples=-5), "message"),
    "a million million images": (saying(samples=10**12), "samples"),
    "loss beyond measure": (saying(loss=1e300), "finite"),
    "loss that is no number": (saying(loss="low"), "message"),
    "another client": (saying(client=2), "client"),
    "the cohort": (saying(client=COHORT), "client"),
    "another round": (saying(round=ROUND + 1), "round"),
    "garbage": (lambda blob: b"garbage" * 100, "message"),
    "empty": (lambda blob: b"", "message"),
    "half": (lambda blob: blob[: len(blob) // 2], "message"),
    "no update": (lambda blob: replace(Answer.from_bytes(blob), packed=b"").to_bytes(), "reply"),
    "an update of no tensors": (lambda blob: replace(Answer.from_bytes(blob), packed=b"1234").to_bytes(), "message"),
    "more hits than images": (figures(correct=10**6), "message"),
    "figures without end": (figures(nll=10**400), "message"),
    "a long story": (complaining, "story"),
    "absent": (lambda blob: Failure(LIAR, "absent", "must be connected"), "absent"),
    "too late": (lambda blob: Failure(LIAR, "deadline", "must answer within 5 s"), "deadline"),
}
UNREADABLE = {"garbage", "empty", "half", "ten megabytes", "more hits than images", "figures without end"}


def refusing(client: int, round: int) -> type[InProcess]:
    """An engine in process that loses the update of one client in one round."""

    class Refusing(InProcess):
        def train(self, number: int, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
            for message in super().train(number, clients, download):
                lost = (message.client, number) == (client, round)
                yield Failure(client, "lost", "for a test") if lost else message

    return Refusing


FEDERATION = {"rounds": 3, "fraction": 1.0}


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in process in which that update was refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "InProcess", refusing(LIAR, ROUND))
        return run_here(tiny_settings(tmp_path_factory.mktemp("here"), "without", federation=FEDERATION))


def events(run: Run, kind: str) -> list[tuple[int, int | None, str]]:
    return [(round, client, detail) for round, client, found, detail in run.reader.events() if found == kind]


@pytest.mark.parametrize("name", TAMPERED)
def test_the_round_goes_on_without_a_client_that_breaks_a_rule(name: str, without_it: Run, tmp_path: Path) -> None:
    tamper, rule = TAMPERED[name]
    post = Tampering(tamper)
    run = run_remotely(tiny_settings(tmp_path, "tampered", federation=FEDERATION), post)
    ((round, client, detail),) = events(run, REFUSED)
    assert (round, client) == (ROUND, LIAR)
    assert json.loads(detail)["rule"] == rule
    assert len(detail) < 2 * LONGEST_TEXT
    assert worst_difference(shared_tensors(run), shared_tensors(without_it)) <= 1e-5
    kept = kept_tensors(run, LIAR)
    expected = wire.decode(without_it.reader.client_state(LIAR) or b"")
    assert kept is not None
    assert worst_difference(kept, expected) <= 1e-5
    assert [record.bytes_up for record in run.rounds()] == [record.bytes_up for record in without_it.rounds()]
    # it is told to begin again where the last commit left it
    asked = {order.train: order for order in map(Order.from_bytes, of_client(post.orders, LIAR))}
    assert asked[ROUND + 1].state == asked[ROUND + 1].committed == asked[1].keep_as
    untested = [(number, client) for number, client, _ in events(run, UNTESTED)]
    lost = name in UNREADABLE or rule in ("absent", "deadline")
    assert untested == ([(ROUND - 1, LIAR)] if lost else [])


def of_client(messages: Iterable[tuple[int, bytes]], client: int) -> list[bytes]:
    return [blob for who, blob in messages if who == client]


def test_an_answer_of_an_earlier_round_is_refused(without_it: Run, tmp_path: Path) -> None:
    post = Tampering(lambda blob: of_client(post.answers, LIAR)[0])
    run = run_remotely(tiny_settings(tmp_path, "replayed", federation=FEDERATION), post)
    ((round, client, detail),) = events(run, REFUSED)
    assert (round, client, json.loads(detail)["rule"]) == (ROUND, LIAR, "round")
    assert [(number, who) for number, who, _ in events(run, UNTESTED)] == [(ROUND - 1, LIAR)]
    assert worst_difference(shared_tensors(run), shared_tensors(without_it)) <= 1e-5


def test_an_update_counts_although_the_figures_of_the_evaluation_are_missing(tmp_path: Path) -> None:
    honest = run_remotely(tiny_settings(tmp_path, "honest", federation=FEDERATION))
    tamper: Tamper = lambda blob: replace(Answer.from_bytes(blob), result=None).to_bytes()  # noqa: E731
    run = run_remotely(tiny_settings(tmp_path, "untested", federation=FEDERATION), Tampering(tamper))
    ((round, client, detail),) = events(run, UNTESTED)
    assert (round, client) == (ROUND - 1, LIAR)
    assert "must come with the figures of the evaluation" in detail
    assert not events(run, REFUSED)
    assert worst_difference(shared_tensors(run), shared_tensors(honest)) == 0
    assert LIAR not in run.reader.evaluations(ROUND - 1)
    assert LIAR in run.reader.evaluations(ROUND)


def test_a_client_that_is_only_tested_may_fail_too(tmp_path: Path) -> None:
    """After the last round there is nothing left to train. Who follows the run hears that it was not tested."""
    heard: list[tuple[int, int]] = []

    class Listening(Observer):
        def untested(self, round: int, failure: Failure) -> None:
            heard.append((round, failure.client))

    run = run_remotely(tiny_settings(tmp_path, "last"), Tampering(lambda blob: b"", round=None), Listening())
    ((round, client, detail),) = events(run, UNTESTED)
    assert heard == [(2, LIAR)]
    assert (round, client) == (2, LIAR)
    assert "message is malformed" in detail
    assert sorted(run.reader.evaluations(2)) == [0, 2, 3]


def test_a_client_may_fail_in_the_survey(tmp_path: Path) -> None:
    values = tiny_settings(tmp_path, "survey", method={"name": "pep_fedpt"}, federation={"rounds": 1})
    run = run_remotely(values, Tampering(lambda blob: b"no", round=None, times=1))
    ((round, client, detail),) = events(run, REFUSED)
    assert (round, client, json.loads(detail)["rule"]) == (0, LIAR, "message")


def test_a_round_without_quorum_asks_everybody_again(tmp_path: Path) -> None:
    """The answers that were there before the round began count once; a second attempt needs new ones."""
    guard = {"quorum": 1.0, "repeats": 1}
    honest = run_remotely(tiny_settings(tmp_path, "honest", federation=FEDERATION))
    post = Tampering(lambda blob: b"", times=1)
    run = run_remotely(tiny_settings(tmp_path, "repeated", federation=FEDERATION, guard=guard), post)
    assert [(number, who) for number, who, _ in events(run, REFUSED)] == [(ROUND, LIAR)]
    assert [number for number, _, _ in events(run, "repeated")] == [ROUND]
    asked = [order for order in (Order.from_bytes(blob) for _, blob in post.orders) if order.train == ROUND]
    assert sorted(order.client for order in asked) == sorted([0, 1, 2, 3] * 2)
    assert len({order.keep_as for order in asked}) == 8
    assert worst_difference(shared_tensors(run), shared_tensors(honest)) == 0
    for client in range(4):
        assert worst_difference(kept_tensors(run, client) or {}, kept_tensors(honest, client) or {}) == 0


def test_an_answer_that_came_early_counts_in_the_first_attempt_only() -> None:
    """Whoever is not in the cohort after all is asked anew when its turn comes."""
    asked: list[Order] = []

    class Echo:
        def deliver(self, orders: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Came]]:
            for client, blob in orders:
                asked.append(Order.from_bytes(blob))
                yield client, Answer(packed=wire.pack(LocalUpdate(client, ROUND, {}, 1))).to_bytes()

    most_bytes, states = {"start": 0, "round": 0}, ClientStates(lambda client: None)
    engine = Remote(Echo(), Setting("0" * 32, {}, "digest"), states, most_bytes, torch.device("cpu"))
    nothing: Download = lambda client: {}  # noqa: E731
    list(engine.evaluate(1, [0, 1], nothing, lambda: Training(ROUND, [0, 1], nothing)))
    assert [(order.client, order.evaluate, order.train) for order in asked] == [(0, 1, 2), (1, 1, 2)]
    list(engine.train(ROUND, [0], nothing))
    assert len(asked) == 2, "its answer was there"
    list(engine.train(ROUND, [0, 1], nothing))
    assert [(order.client, order.evaluate, order.train) for order in asked[2:]] == [(0, None, 2), (1, None, 2)]


def test_a_repeated_round_draws_another_cohort_and_forgets_the_first(tmp_path: Path) -> None:
    """The same as in process, where the same update is lost in the first attempt."""
    federation, guard = {"rounds": 3, "fraction": 0.5}, {"quorum": 1.0, "repeats": 3}
    settings = tiny_settings(tmp_path, "here", federation=federation, guard=guard, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "InProcess", refusing(LIAR, ROUND))
        here = run_here(settings)
    run = run_remotely({**settings, "name": "post"}, Tampering(TAMPERED["absent"][0]))
    assert events(here, "repeated") == events(run, "repeated") != []
    assert [record.cohort for record in run.rounds()] == [record.cohort for record in here.rounds()]
    assert worst_difference(shared_tensors(run), shared_tensors(here)) <= 1e-5


def test_a_run_ends_with_its_state_intact_where_no_quorum_is_left(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, "quorum", federation=FEDERATION, guard={"quorum": 1.0, "repeats": 1})
    with pytest.raises(QuorumError, match=r"round 2 must have 4 accepted updates of 4 .*got 3: client_1"):
        run_remotely(settings, Tampering(TAMPERED["no images"][0]))
    resumed = run_remotely(settings)
    honest = run_remotely(tiny_settings(tmp_path, "honest", federation=FEDERATION, guard={"quorum": 1.0, "repeats": 1}))
    assert worst_difference(shared_tensors(resumed), shared_tensors(honest)) == 0
    assert_same_figures(resumed, honest, within=0.0)


def test_a_client_that_diverges_says_so_and_is_tested_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node finds out before it sends anything, as in process."""
    from fedprompt.client.runtime import ClientRuntime
    from fedprompt.errors import DivergenceError

    train = ClientRuntime.train

    def diverging(self: ClientRuntime, round: int, client: int, received: Tensors) -> LocalUpdate:
        if (round, client) == (ROUND, LIAR):
            raise DivergenceError("upload of client 'client_1': tensor 'prompt' must be finite")
        return train(self, round, client, received)

    monkeypatch.setattr(ClientRuntime, "train", diverging)
    run = run_remotely(tiny_settings(tmp_path, "diverged", federation=FEDERATION))
    ((round, client, detail),) = events(run, REFUSED)
    assert (round, client, json.loads(detail)["rule"]) == (ROUND, LIAR, "finite")
    assert not events(run, UNTESTED)


def test_an_honest_run_has_no_events_but_warnings(tmp_path: Path) -> None:
    here = run_here(tiny_settings(tmp_path, "here", federation=FEDERATION))
    post = run_remotely(tiny_settings(tmp_path, "post", federation=FEDERATION), Tampering(lambda blob: blob))
    assert_same_as_in_process(post, here)
    assert {kind for _, _, kind, _ in post.reader.events()} <= {WARNING}  # tiny images: it hardly learns
