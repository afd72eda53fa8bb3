"""Orders and answers as Flower messages: one record with one field of bytes, which Flower does not read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import httpx
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedprompt.core.messages import Failure
from fedprompt.engines.flower.compat import UNAVAILABLE
from fedprompt.engines.remote.protocol import Answer
from fedprompt.errors import RunError

RECORD = "fedprompt"
ORDER, ANSWER = "order", "answer"
PAUSE = 0.2  # seconds between two checks for answers
EACH = 0.02  # the same per open answer, if there are many
SETTLE = 5.0  # seconds without a new site after which the list of sites is complete
SKEW = 305.0  # seconds by which the clocks of two machines may differ; Flower uses the same limit
LONGEST_REASON = 500  # characters of Flower's reason for a failed message


def order_in(message: Message) -> bytes:
    """The order in a message to a node; empty if there is none."""
    return _field(message, ORDER) or b""


def answered(message: Message, answer: bytes) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord({ANSWER: answer})}), reply_to=message)


def _field(message: Message, name: str) -> bytes | None:
    records = message.content.config_records if message.has_content() else {}
    value = records[RECORD].get(name) if RECORD in records else None
    return value if isinstance(value, bytes) else None


class GridPost:
    """Carries orders to the nodes of a grid, a window of them at a time."""

    def __init__(
        self,
        grid: Grid,
        deadline: float,
        patience: float = 0.0,
        window: int = 10**6,
        over: Callable[[], bool] = lambda: False,
        late_rounds: int = 0,
    ) -> None:
        """A node has `deadline` seconds for an order. A round waits `patience` seconds for a node that is not connected.

        `over` returns True when the answers are no longer needed. Messages stay for `late_rounds` more deadlines.
        """
        self._life = (1 + late_rounds) * deadline + SKEW
        self._missed: dict[int, str] = {}  # the message of each client that missed its deadline
        self._grid, self._deadline, self._patience, self._window = grid, deadline, patience, window
        self._over = over

    def nodes(self) -> Mapping[int, int]:
        """The connected nodes by client. In a simulation any node can act as any client."""
        return dict(enumerate(sorted(self._grid.get_node_ids())))

    def deliver(
        self, orders: Iterable[tuple[int, bytes | None]], patience: float | None = None
    ) -> Iterator[tuple[int, bytes | Failure]]:
        """The answers as they arrive. `patience`, if given, replaces the usual one. None asks for a late answer."""
        patience = self._patience if patience is None else patience
        waiting: dict[str, tuple[int, float]] = {}  # message -> client and its deadline
        absent: dict[int, bytes] = {}
        more, nodes, begin = iter(orders), self.nodes(), time.monotonic()
        exhausted = False
        while not exhausted or waiting or absent:
            if self._over():
                raise RunError("run was stopped while it waited for nodes")
            if absent and time.monotonic() - begin > patience:
                yield from ((client, Failure(client, "absent", "must be connected")) for client in absent)
                absent = {}
            nodes = self.nodes() if absent else nodes
            ready = [(client, absent.pop(client)) for client in [*absent] if client in nodes]
            while not exhausted and len(waiting) + len(ready) < self._window:
                following = next(more, None)
                exhausted = following is None
                if following is None:
                    continue
                client, order = following
                if order is None:
                    number = self._missed.get(client)
                    if number is None or client not in nodes:
                        yield client, Failure(client, "absent", "must be connected to send what is late")
                    else:
                        waiting[number] = (client, time.monotonic() + self._deadline)
                elif client in nodes:
                    ready.append((client, order))
                else:
                    absent[client] = order
            waiting |= self._sent(ready, nodes)
            came = False
            for client, answer in self._arrived(waiting):
                came = True
                yield client, answer
            if (waiting or absent) and not came:
                time.sleep(max(PAUSE, EACH * len(waiting)))

    def _sent(self, orders: Sequence[tuple[int, bytes]], nodes: Mapping[int, int]) -> dict[str, tuple[int, float]]:
        """The sent messages, by their number."""
        if not orders:
            return {}
        messages = [self._message(nodes[client], order) for client, order in orders]
        numbers: list[str | None] = list(self._grid.push_messages(messages))
        numbers = numbers or [None] * len(messages)  # None: too large for Flower
        end = time.monotonic() + self._deadline
        for client, _ in orders:
            self._missed.pop(client, None)
        return {
            number or f"unsent {client}": (client, end if number else -math.inf)
            for (client, _), number in zip(orders, numbers, strict=True)
        }

    def _message(self, node: int, order: bytes) -> Message:
        content = RecordDict({RECORD: ConfigRecord({ORDER: order})})
        return Message(content, node, MessageType.TRAIN, ttl=self._life)

    def _arrived(self, waiting: dict[str, tuple[int, float]]) -> Iterator[tuple[int, bytes | Failure]]:
        """New answers and missed deadlines; both are removed from `waiting`."""
        if not waiting:
            return
        for message in self._pulled([number for number, (_, end) in waiting.items() if end > 0]):
            if isinstance(message, tuple):
                client, _ = waiting.pop(message[0])
                yield client, Failure(client, "message", f"message is malformed: {message[1]}")
                continue
            known = waiting.pop(message.metadata.reply_to_message_id, None)
            if known is not None:
                yield known[0], self._read(known[0], message)
        now = time.monotonic()
        for number in [number for number, (_, end) in waiting.items() if end < now]:
            client, end = waiting.pop(number)
            if end > 0:
                self._missed[client] = number
            late = Failure(client, "deadline", f"must answer within {self._deadline:g} s")
            yield client, late if end > 0 else Failure(client, "absent", "must be there to take a message of this size")

    def _pulled(self, numbers: Sequence[str]) -> Iterator[Message | tuple[str, str]]:
        """The messages that have arrived."""
        yield from self._grid.pull_messages(numbers) if numbers else ()

    def _read(self, client: int, message: Message) -> bytes | Failure:
        if message.has_error():
            gone = message.error.code == UNAVAILABLE
            return Failure(client, "absent" if gone else "node", str(message.error.reason)[:LONGEST_REASON])
        answer = _field(message, ANSWER)
        return Failure(client, "message", f"must have a field {ANSWER!r} of bytes") if answer is None else answer


class SitesByGrid(GridPost):
    """The same for sites, identified by the names of their registered keys."""

    def __init__(
        self, grid: Grid, deadline: float, patience: float, trusting: bool = False, late_rounds: int = 0
    ) -> None:
        """`trusting` accepts the name that an unregistered node gives itself: for insecure federations only."""
        super().__init__(grid, deadline, patience, late_rounds=late_rounds)
        self._trusting = trusting
        self._introductions: dict[int, str] = {}
        self._names: tuple[str, ...] = ()
        self._introduction = b""

    def meet(self, order: bytes, names: Sequence[str]) -> Mapping[str, bytes | Failure]:
        self._introduction = order
        self._wait_for(names)
        sites = self._sites()
        chosen = list(names or sorted(sites))
        self.number(chosen)
        delivered = self.deliver(
            ((client, order) for client in range(len(chosen))), patience=0.0
        )  # waiting is already done
        return {chosen[client]: came for client, came in delivered}

    def number(self, names: Sequence[str], introduction: bytes = b"") -> None:
        self._names, self._introduction = tuple(names), introduction or self._introduction

    def nodes(self) -> Mapping[int, int]:
        sites = self._sites()
        return {client: sites[name] for client, name in enumerate(self._names) if name in sites}

    def _pulled(self, numbers: Sequence[str]) -> Iterator[Message | tuple[str, str]]:
        """Pull messages one by one: Flower raises at an unreadable message, after it has deleted those before it."""
        for number in numbers:
            try:
                yield from self._grid.pull_messages([number])
            except httpx.HTTPError:
                raise
            except Exception as error:  # any kind that Flower's parser raises
                yield number, type(error).__name__

    def _sites(self) -> dict[str, int]:
        """The connected nodes by name."""
        connected = {node.node_id: node.name for node in self._grid.get_nodes()}
        if self._trusting:
            self._ask({node for node, name in connected.items() if not name} - set(self._introductions))
            met = list(self._introductions)  # if two give the same name, one was killed: the later one counts
            connected = {node: name or self._introductions.get(node, "") for node, name in connected.items()}
            connected = dict(sorted(connected.items(), key=lambda each: met.index(each[0]) if each[0] in met else -1))
        return {name: node for node, name in connected.items() if name}

    def _ask(self, strangers: set[int]) -> None:
        """Request the names of nodes without a registered name."""
        if not strangers or not self._introduction:
            return
        order = sorted(strangers)
        asking = _Fixed(self._grid, self._deadline, order)
        for place, came in asking.deliver((place, self._introduction) for place in range(len(order))):
            name = "" if isinstance(came, Failure) else _name_in(came)
            self._introductions[order[place]] = name

    def _wait_for(self, names: Sequence[str]) -> None:
        """Wait until all of these are connected; if none are given, until no new one has connected for a while."""
        begin = last = time.monotonic()
        known: set[str] = set()
        while time.monotonic() - begin < self._patience:
            found = set(self._sites())
            if names and found.issuperset(names):
                return
            if found != known:
                known, last = found, time.monotonic()
            if not names and known and time.monotonic() - last > SETTLE:
                return
            time.sleep(PAUSE)


class _Fixed(GridPost):
    """Carries orders to given nodes."""

    def __init__(self, grid: Grid, deadline: float, nodes: Sequence[int]) -> None:
        super().__init__(grid, deadline)
        self._given = dict(enumerate(nodes))

    def nodes(self) -> Mapping[int, int]:
        return self._given


def _name_in(blob: bytes) -> str:
    try:
        met = Answer.from_bytes(blob).meeting
    except ValueError:
        return ""
    return "" if met is None else met.name


Work = Callable[[GridPost], None]  # called once the nodes can be reached
