"""Orders over a grid of Flower's kind whose nodes and clock are made up: who is waited for, how long, and what is made of what comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedprompt.core.messages import Failure
from fedprompt.engines.flower import transport
from fedprompt.engines.flower.transport import LONGEST_REASON, SETTLE, GridPost, SitesByGrid, answered, order_in
from fedprompt.engines.remote.protocol import Answer, Meeting
from fedprompt.errors import RunError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def inside_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only in a process that works for a run."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(transport, "time", made)
    return made


def shouting(message: Message) -> Message:
    """What a node makes of an order."""
    return answered(message, order_in(message).upper())


@dataclass
class Somebody:
    """A node: how it answers, after how long, when it is connected, and under which name."""

    answer: Callable[[Message], Message | None] = shouting
    after: float = 0.0
    since: float = 0.0
    name: str = ""


@dataclass
class FakeGrid:
    """What `GridPost` needs of Flower's grid."""

    clock: Clock
    somebody: dict[int, Somebody]
    sent: list[Message] = field(default_factory=list)
    replies: dict[str, tuple[float, Message]] = field(default_factory=dict)
    most: int = 0  # messages that were ever under way at the same time
    unread: set[str] = field(default_factory=set)  # numbers of messages that Flower cannot read

    def get_node_ids(self) -> list[int]:
        return [node for node, who in self.somebody.items() if self.clock.now >= 1000 + who.since]

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name=self.somebody[node].name) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        numbers = []
        for message in messages:
            number = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            who = self.somebody[message.metadata.dst_node_id]
            reply = who.answer(message)
            if reply is not None:
                self.replies[number] = (self.clock.now + who.after, reply)
            numbers.append(number)
        self.most = max(self.most, len(self.replies))
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> Iterator[Message]:
        for number in numbers:
            if number in self.unread:
                raise TypeError("cannot read")
            if number in self.replies and self.replies[number][0] <= self.clock.now:
                yield self.replies.pop(number)[1]


def post_to(grid: FakeGrid, deadline: float = 10.0, **options: Any) -> GridPost:
    return GridPost(grid, deadline, **options)  # type: ignore[arg-type]


def sites_on(grid: FakeGrid, patience: float = 3.0, trusting: bool = False) -> SitesByGrid:
    return SitesByGrid(grid, 10.0, patience, trusting)  # type: ignore[arg-type]


def orders(*clients: int) -> list[tuple[int, bytes]]:
    return [(client, f"order {client}".encode()) for client in clients]


def test_every_client_has_its_answer(clock: Clock) -> None:
    grid = FakeGrid(clock, {node: Somebody(after=node) for node in (30, 20, 10)})
    came = list(post_to(grid, deadline=60).deliver(orders(0, 1, 2)))
    assert came == [(0, b"ORDER 0"), (1, b"ORDER 1"), (2, b"ORDER 2")]
    assert [message.metadata.dst_node_id for message in grid.sent] == [10, 20, 30]
    assert all(message.metadata.ttl >= 60 for message in grid.sent), "Flower keeps it as long as it is waited for"


def test_who_is_quick_is_heard_first(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(after=5), 2: Somebody(after=1)})
    assert [client for client, _ in post_to(grid).deliver(orders(0, 1))] == [1, 0]


def test_who_does_not_answer_in_time_is_a_failure_and_the_others_are_heard(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(lambda message: None), 2: Somebody(after=9)})
    came = dict(post_to(grid).deliver(orders(0, 1)))
    assert came == {0: Failure(0, "deadline", "must answer within 10 s"), 1: b"ORDER 1"}
    assert 1010 <= clock.now <= 1011


def test_a_late_answer_is_nobodys_answer(clock: Clock) -> None:
    """The order that follows is a message of its own; what comes late to the first one changes nothing."""
    slow = Somebody(after=12)
    grid = FakeGrid(clock, {1: slow})
    post = post_to(grid)
    assert list(post.deliver([(0, b"first")])) == [(0, Failure(0, "deadline", "must answer within 10 s"))]
    slow.after = 0
    clock.now += 5
    late, pull = grid.replies["message-0"][1], grid.pull_messages
    grid.pull_messages = lambda numbers: iter([late, *pull(numbers)])  # type: ignore[method-assign]
    assert list(post.deliver([(0, b"second")])) == [(0, b"SECOND")]


def test_a_node_that_is_not_connected_is_waited_for_as_long_as_patience_lasts(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody()})
    came = dict(post_to(grid, patience=4.0).deliver(orders(0, 1)))
    assert came == {0: b"ORDER 0", 1: Failure(1, "absent", "must be connected")}
    assert 1004 < clock.now < 1005


def test_a_node_that_appears_meanwhile_gets_its_order(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(), 2: Somebody(since=2.0, after=8)})
    assert dict(post_to(grid, patience=4.0).deliver(orders(0, 1))) == {0: b"ORDER 0", 1: b"ORDER 1"}


def test_an_error_of_flower_is_a_failure_with_its_reason(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(lambda message: Message(Error(3, "gone " * 1000), reply_to=message))})
    ((client, came),) = post_to(grid).deliver(orders(0))
    assert isinstance(came, Failure)
    assert (client, came.rule, len(came.value)) == (0, "node", LONGEST_REASON)


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"fedprompt": {}},
        {"fedprompt": {"answer": "text"}},
        {"fedprompt": {"answer": [b"a"]}},
        {"x": {"answer": b""}},
    ],
    ids=["nothing", "empty", "text", "list", "other"],
)
def test_a_message_without_an_answer_is_a_failure(clock: Clock, records: dict[str, dict[str, Any]]) -> None:
    def answer(message: Message) -> Message:
        content = RecordDict({name: ConfigRecord(record) for name, record in records.items()})
        return Message(content, reply_to=message)

    ((_, came),) = post_to(FakeGrid(clock, {1: Somebody(answer)})).deliver(orders(0))
    assert came == Failure(0, "message", "must have a field 'answer' of bytes")


def test_an_order_is_read_as_it_was_sent() -> None:
    message = Message(RecordDict({"fedprompt": ConfigRecord({"order": b"do"})}), 1, "train")
    assert order_in(message) == b"do"
    assert order_in(Message(RecordDict(), 1, "train")) == b""
    assert order_in(Message(Error(1), reply_to=message)) == b""


def test_no_more_orders_are_under_way_than_the_window_has_room_for(clock: Clock) -> None:
    grid = FakeGrid(clock, {node: Somebody(after=node % 3) for node in range(20)})
    made: list[int] = []

    def lazily() -> Iterator[tuple[int, bytes]]:
        for client, order in orders(*range(20)):
            made.append(client)
            yield client, order

    came = post_to(grid, window=4).deliver(lazily())
    next(came)
    assert len(made) <= 4, "orders are made when there is room for them"
    assert len(dict(came)) == 19
    assert grid.most <= 4


def test_nothing_is_waited_for_when_the_run_is_over(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(lambda message: None)})
    over = iter([False, False, True])
    with pytest.raises(RunError, match="run was stopped while it waited for nodes"):
        list(post_to(grid, deadline=1e9, over=lambda: next(over)).deliver(orders(0)))


def test_nobody_to_ask_is_nothing_to_wait_for(clock: Clock) -> None:
    assert list(post_to(FakeGrid(clock, {})).deliver([])) == []
    assert clock.now == 1000


@pytest.mark.parametrize("numbers", [[], [None]], ids=["none at all", "not this one"])
def test_a_message_that_flower_does_not_take_is_a_failure_at_once(clock: Clock, numbers: list[Any]) -> None:
    grid = FakeGrid(clock, {1: Somebody()})
    grid.push_messages = lambda messages: numbers  # type: ignore[method-assign]
    ((client, came),) = post_to(grid).deliver(orders(0))
    assert isinstance(came, Failure)
    assert (client, came.rule) == (0, "absent")
    assert clock.now < 1001


# -- sites ------------------------------------------------------------------------------------------------------------


def introducing(name: str) -> Callable[[Message], Message]:
    """A site that says its name, and nothing else."""
    return lambda message: answered(message, Answer(meeting=Meeting(name, ("a", "b"), "digest")).to_bytes())


def test_sites_are_known_by_the_names_of_their_keys(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(name="a"), 2: Somebody(name="b"), 3: Somebody(introducing("c"))})
    post = sites_on(grid)
    post.number(["b", "c", "a"])
    came = dict(post.deliver(orders(0, 1, 2)))
    assert came == {0: b"ORDER 0", 1: Failure(1, "absent", "must be connected"), 2: b"ORDER 2"}
    assert [message.metadata.dst_node_id for message in grid.sent] == [2, 1], "who has no name is asked nothing"


def test_where_there_are_no_keys_nodes_are_asked_for_their_names(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(introducing("a")), 2: Somebody(introducing("b"))})
    post = sites_on(grid, trusting=True)
    met = post.meet(b"meet", ["b", "a"])
    assert [Answer.from_bytes(came).meeting.name for came in met.values() if isinstance(came, bytes)] == ["b", "a"]  # type: ignore[union-attr]
    post.number(["b", "a"])
    before = len(grid.sent)
    list(post.deliver(orders(0)))
    assert [message.metadata.dst_node_id for message in grid.sent[before:]] == [2], "and only once"


def test_a_registered_name_counts_more_than_what_a_node_says(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(introducing("b"), name="a"), 2: Somebody(introducing("b"))})
    assert set(sites_on(grid, trusting=True).meet(b"meet", [])) == {"a", "b"}


@pytest.mark.parametrize(
    "answer",
    [shouting, lambda message: None, lambda message: Message(Error(1), reply_to=message)],
    ids=["nonsense", "nothing", "error"],
)
def test_a_node_that_does_not_say_its_name_has_none(clock: Clock, answer: Any) -> None:
    grid = FakeGrid(clock, {1: Somebody(introducing("a")), 2: Somebody(answer)})
    assert set(sites_on(grid, patience=30, trusting=True).meet(b"meet", [])) == {"a"}


def test_a_meeting_waits_for_the_sites_it_wants(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(introducing("a"), name="a"), 2: Somebody(introducing("b"), name="b", since=2)})
    met = sites_on(grid).meet(b"meet", ["a", "b"])
    assert all(isinstance(came, bytes) for came in met.values())
    assert 1002 <= clock.now < 1003


def test_a_meeting_tells_who_is_missing(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(introducing("a"), name="a")})
    met = sites_on(grid).meet(b"meet", ["a", "b"])
    assert isinstance(met["a"], bytes)
    assert met["b"] == Failure(1, "absent", "must be connected")
    assert 1003 <= clock.now < 1004, "nobody is waited for twice"


def test_a_meeting_of_whoever_is_there_waits_until_no_other_comes(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(introducing("a"), name="a"), 2: Somebody(introducing("b"), name="b", since=3)})
    assert set(sites_on(grid, patience=60).meet(b"meet", [])) == {"a", "b"}
    assert 1003 + SETTLE < clock.now < 1004 + SETTLE


def test_nobody_at_all_is_an_empty_meeting(clock: Clock) -> None:
    assert sites_on(FakeGrid(clock, {})).meet(b"meet", []) == {}


def test_a_message_that_flower_cannot_read_costs_nobody_else_anything(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(name="a"), 2: Somebody(name="b")}, unread={"message-0"})
    post = sites_on(grid)
    post.number(["a", "b"])
    came = dict(post.deliver(orders(0, 1)))
    assert came == {0: Failure(0, "message", "message is malformed: TypeError"), 1: b"ORDER 1"}


def test_a_server_that_is_gone_ends_the_run(clock: Clock) -> None:
    def gone(numbers: Iterable[str]) -> Iterator[Message]:
        raise httpx.ConnectError("gone")

    grid = FakeGrid(clock, {1: Somebody(name="a")})
    grid.pull_messages = gone  # type: ignore[method-assign]
    post = sites_on(grid)
    post.number(["a"])
    with pytest.raises(httpx.ConnectError):
        list(post.deliver(orders(0)))


def test_a_site_that_comes_back_as_another_node_is_the_same_site(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(name="a")})
    post = sites_on(grid)
    post.number(["a"])
    assert list(post.deliver(orders(0))) == [(0, b"ORDER 0")]
    grid.somebody = {7: Somebody(name="a", since=1)}
    assert list(post.deliver(orders(0))) == [(0, b"ORDER 0")]
    assert [message.metadata.dst_node_id for message in grid.sent] == [1, 7]


def test_a_late_answer_is_fetched_when_it_is_asked_for(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(), 2: Somebody(after=25.0)})
    post = post_to(grid, deadline=10.0, late_rounds=2)
    first = dict(post.deliver([(0, b"a"), (1, b"b")]))
    assert (first[0], rule_of(first[1])) == (b"A", "deadline")
    assert rule_of(dict(post.deliver([(1, None)]))[1]) == "deadline"
    assert dict(post.deliver([(1, None)])) == {1: b"B"}
    assert grid.sent[1].metadata.ttl >= 30.0, "the message lives as long as it is waited for"


def test_who_is_gone_is_not_waited_for(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: Somebody(), 2: Somebody(after=25.0)})
    post = post_to(grid, deadline=10.0)
    list(post.deliver([(1, b"b")]))
    del grid.somebody[2]
    begin = clock.now
    assert rule_of(dict(post.deliver([(1, None)]))[1]) == "absent"
    assert clock.now == begin


def rule_of(came: bytes | Failure) -> str:
    assert isinstance(came, Failure)
    return came.rule
