"""An engine for clients on other machines: one message per client and round. Their own tensors stay on their machine.

The run file contains only the number under which a client has stored its tensors. A round without a commit leaves that number
unchanged, so a resumed run begins at the last commit on every node.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fedprompt.client.client_states import ClientStates
from fedprompt.config import Config
from fedprompt.core.messages import Download, Failure, LocalUpdate, NextTraining
from fedprompt.core.method import World
from fedprompt.engines.remote.node_state import KEPT_AS, number_of
from fedprompt.engines.remote.protocol import MOST_NUMBER, Answer, Kind, Order, Setting
from fedprompt.errors import ContractError
from fedprompt.federation.guard import Guard
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.privacy.mechanism import as_sent
from fedprompt.tensors import Tensors

DEADLINE = "deadline"  # the rule of a client that did not answer in time
ENVELOPE = 2**20  # bytes of a message besides its tensors: names and shapes, figures of an evaluation


class Transport(Protocol):
    """Carries orders to clients. Every client eventually gives one answer or one failure, in any order.

    None instead of an order asks for the answer to the client's last one, which missed its deadline.
    """

    def deliver(self, orders: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes | Failure]]: ...


@dataclass(frozen=True)
class Open:
    """An order to train that missed its deadline and may still be answered."""

    client: int
    round: int
    kept_as: int | None
    received: Tensors


@dataclass(frozen=True)
class Arrived:
    """The answer of one client, and the number of its stored tensors if the answer is accepted."""

    answer: Answer | Failure
    kept_as: int | None = None
    late: Open | None = None
    """The order that it is about, if that missed its deadline before."""


class Remote:
    """Surveys, trains and evaluates clients through their nodes."""

    def __init__(
        self,
        post: Transport,
        setting: Setting,
        states: ClientStates,
        most_bytes: Mapping[str, int],
        device: torch.device,
        late_rounds: int = 0,
    ) -> None:
        """`most_bytes`: limit for an update, by the phase in which it is sent. An update may be `late_rounds` late."""
        self._late_rounds = late_rounds
        self._open: dict[int, Open] = {}  # by client; they get no other order meanwhile
        self._post, self._setting, self._states = post, setting, states
        self._most_bytes, self._device = most_bytes, device
        self._early: dict[
            tuple[int, int], Arrived
        ] = {}  # by round and client: updates that came with the evaluation before

    def survey(self, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        orders = (self._order("survey", client, download(client)) for client in clients)
        for client, arrived in self._delivered(orders):
            yield self._reply(client, arrived, "start")

    def train(self, round: int, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        """The replies that have already arrived, then those of the other clients, also of those that are late."""
        early = {client: arrived for (number, client), arrived in self._early.items() if number == round}
        self._early.clear()  # leftovers of a round that was not requested
        for client, arrived in early.items():
            if arrived.late is None and client in clients:
                download(client)  # counts the downloaded bytes
            if client in clients or arrived.late is not None:
                yield from self._kept(round, client, arrived, client in clients)
        self._give_up(round)

        def orders() -> Iterator[Order | Open]:
            for client in clients:
                if client in early:
                    continue
                if client in self._open:
                    yield self._open[client]
                else:
                    yield replace(self._order("work", client, download(client)), train=round, keep_as=_new_number())
            yield from (each for client, each in self._open.items() if client not in {*clients, *early})

        for client, arrived in self._delivered(orders()):
            yield from self._kept(round, client, arrived, client in clients)

    def evaluate(
        self, round: int, clients: Sequence[int], download: Download, ahead: NextTraining | None = None
    ) -> Iterator[tuple[int, ClientResult] | Failure]:
        """The results of a round. The same messages also order the next training.

        A client that is still working on an earlier order is not tested, but its late update is waited for.
        """
        training = None if ahead is None else ahead()
        tested, trained = set(clients), set(training.clients) if training else set()
        if training is None:
            self._open.clear()  # the last round: nothing of theirs will count, so they are tested like the others
        self._give_up(round + 1)
        busy = dict(self._open)

        def orders() -> Iterator[Order | Open]:
            yield from busy.values()
            for client in sorted((tested | trained) - busy.keys()):
                if training is None or client not in trained:
                    yield replace(self._order("work", client, download(client)), evaluate=round)
                    continue
                order = self._order("work", client, training.download(client))
                order = replace(order, train=training.round, keep_as=_new_number())
                yield replace(order, evaluate=round) if client in tested else order

        for client, arrived in self._delivered(orders()):
            if training is not None and (client in trained or arrived.late is not None):
                self._early[training.round, client] = arrived
            if client not in tested:
                continue
            answer = arrived.answer
            if client in busy:
                yield Failure(client, "deadline", f"was still working on its order of round {busy[client].round}")
            elif isinstance(answer, Answer) and answer.result is not None:
                yield client, answer.result
            else:
                withheld = answer.withheld if isinstance(answer, Answer) else None
                reason = withheld or ("result", "must come with the figures of the evaluation")
                yield _failure(client, answer, *reason)

    def discard(self, clients: Iterable[int]) -> None:
        """Drop the changes of these clients since the last commit: their updates were refused."""
        for client in clients:
            self._states.discard(client)

    def take_states(self) -> dict[int, bytes]:
        """The numbers of the states stored by clients since the last call, to be committed with the round."""
        return self._states.take_changes()

    def _order(self, kind: Kind, client: int, received: Tensors) -> Order:
        state, committed = number_of(self._states.get(client)), number_of(self._states.committed(client))
        return Order(kind, self._setting, client, state=state, committed=committed, received=received)

    def _give_up(self, round: int) -> None:
        """Wait no longer for what would be too late in this round."""
        self._open = {client: each for client, each in self._open.items() if round - each.round <= self._late_rounds}

    def _delivered(self, orders: Iterable[Order | Open]) -> Iterator[tuple[int, Arrived]]:
        sent: dict[int, Order | Open] = {}

        def packed() -> Iterator[tuple[int, bytes | None]]:
            for order in orders:
                sent[order.client] = order
                yield order.client, order.to_bytes() if isinstance(order, Order) else None

        limit = max(self._most_bytes.values()) + 2 * ENVELOPE
        for client, came in self._post.deliver(packed()):
            answer = came if isinstance(came, Failure) else _read(client, came, limit)
            order, missed = sent[client], isinstance(came, Failure) and came.rule == DEADLINE
            if isinstance(order, Open):
                if not missed:
                    self._open.pop(client, None)
                yield client, Arrived(answer, order.kept_as, order)
                continue
            if missed and order.train is not None and self._late_rounds:
                self._open[client] = Open(client, order.train, order.keep_as, dict(order.received))
            yield client, Arrived(answer, order.keep_as)

    def _kept(self, round: int, client: int, arrived: Arrived, asked: bool) -> Iterator[LocalUpdate | Failure]:
        """The reply of a client that trained; the guard decides later whether its new state counts.

        What did not come from a client that was not `asked` in this round is no failure of this round.
        """
        reply = self._reply(client, arrived, "round")
        if isinstance(reply, LocalUpdate) and arrived.late is not None:
            if reply.round == arrived.late.round:
                reply = replace(reply, round=round, late=round - reply.round, started=arrived.late.received)
            else:
                reply = Failure(client, "round", f"must answer round {arrived.late.round}, got {reply.round}")
        if isinstance(reply, LocalUpdate) and arrived.kept_as is not None:
            self._states.put(client, {KEPT_AS: torch.tensor(arrived.kept_as)})
        if isinstance(reply, LocalUpdate) or asked:
            yield reply

    def _reply(self, client: int, arrived: Arrived, when: str) -> LocalUpdate | Failure:
        answer = arrived.answer
        if isinstance(answer, Failure) or answer.failure is not None:
            return _failure(client, answer, "reply", "")
        try:
            reply = answer.reply(self._most_bytes[when] + ENVELOPE)
        except ContractError as error:
            return Failure(client, "message", str(error))
        if reply is None:
            return Failure(client, "reply", "must come with an update")
        if reply.client != client:
            return Failure(client, "client", f"must answer for itself, got client {reply.client}")
        return replace(reply, upload={name: tensor.to(self._device) for name, tensor in reply.upload.items()})


def _read(client: int, blob: bytes, limit: int) -> Answer | Failure:
    if len(blob) > limit:
        return Failure(client, "bytes", f"message must have at most {limit} bytes, got {len(blob)}")
    try:
        return Answer.from_bytes(blob)
    except ValueError as error:
        return Failure(client, "message", f"message is malformed: {error}")


def _failure(client: int, answer: Answer | Failure, rule: str, text: str) -> Failure:
    """Why a client gave no result: the failure found here, its own reason, or else the given rule and text."""
    if isinstance(answer, Failure):
        return answer
    return Failure(client, *(answer.failure or (rule, text)))


def _new_number() -> int:
    """A number that no state has, not even one of a lost attempt."""
    return secrets.randbelow(MOST_NUMBER - 1) + 1


def remote_engine(post: Transport, setting: Setting, config: Config, world: World, states: ClientStates) -> Remote:
    """The engine whose clients are reached through a post."""
    guard = Guard(config.guard, as_sent(world.roles, config.privacy), private=config.privacy is not None)
    most_bytes = {when: guard.most_bytes(when) for when in ("start", "round")}
    late_rounds = config.federation.late_rounds if config.federation.staleness else 0
    return Remote(post, setting, states, most_bytes, world.device, late_rounds)
