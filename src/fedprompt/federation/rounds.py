"""The loop: sample, train, audit, aggregate, evaluate, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from fedprompt.config import Config, FederationConfig
from fedprompt.errors import ConfigError, broken
from fedprompt.evaluation.metrics import ClientResult, summarise
from fedprompt.federation import wire
from fedprompt.federation.aggregate import shares, weighted_mean
from fedprompt.federation.messages import Reply
from fedprompt.federation.store import RoundRecord, RunStore
from fedprompt.method import Method, Server, Upload, World
from fedprompt.roles import Tensors
from fedprompt.streams import SERVER, stream


class Engine(Protocol):
    """Where clients run. `download` gives the audited tensors of one client."""

    def survey(self, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[Reply]: ...
    def train(self, round: int, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[Reply]: ...
    def evaluate(
        self, round: int, clients: Sequence[int], download: Callable[[int], Tensors]
    ) -> Iterator[tuple[int, ClientResult]]: ...
    def take_states(self) -> dict[int, bytes]: ...


class Observer:
    """Told what happens while it happens. This one does nothing; the command line's draws progress."""

    def started(self, config: Config, client_names: Sequence[str], rounds_done: int) -> None: ...
    def checked(self, check: Mapping[str, Any]) -> None: ...
    def cohort(self, round: int, clients: Sequence[int]) -> None: ...
    def trained(self, round: int, reply: Reply) -> None: ...
    def evaluated(self, round: int, done: int, of: int) -> None: ...
    def committed(self, record: RoundRecord) -> None: ...
    def finished(self) -> None: ...


def sample_cohort(
    seed: int, round: int, clients: Sequence[int], fraction: float, away: Collection[int] = ()
) -> list[int]:
    """At least one of the clients, in ascending order: the order of work must not matter, so it is not random.

    Clients that are away lose their places and nobody takes them, so the others take part in the rounds they would
    have taken part in anyway; only a cohort in which all are away is replaced by one client that is there.
    """
    count = max(1, round_half_up(fraction * len(clients)))
    drawn = torch.randperm(len(clients), generator=stream(seed, round, SERVER, "cohort")).tolist()
    present = [place for place in range(len(drawn)) if clients[drawn[place]] not in away]
    chosen = [place for place in present if place < count] or present[:1]
    return sorted(clients[drawn[place]] for place in chosen)


def absences(settings: FederationConfig, client_names: Sequence[str], newcomers: Collection[int]) -> dict[int, range]:
    """The rounds in which each absent client cannot be picked, by client number."""
    found = {}
    for name, (first, last) in settings.away.items():
        if name not in client_names:
            some = ", ".join(client_names[:8]) + (", ..." if len(client_names) > 8 else "")
            raise ConfigError(broken("federation.away", f"name clients of the partition ({some})", name))
        if client_names.index(name) in newcomers:
            raise ConfigError(broken("federation.away", "name clients that are not held out of training", name))
        if first > settings.rounds:
            raise ConfigError(broken(f"federation.away.{name}", f"begin within the {settings.rounds} rounds", first))
        found[client_names.index(name)] = range(first, last + 1)
    taking_part = len(client_names) - len(newcomers)
    for round in range(1, settings.rounds + 1):
        if sum(round in rounds for rounds in found.values()) == taking_part:
            raise ConfigError(broken("federation.away", "leave a client to train in every round", f"none in {round}"))
    return found


def sample_newcomers(seed: int, clients: int, share: float) -> frozenset[int]:
    """The clients that are held out for a whole run; at least one stays in, and one is held out if any share is asked for."""
    if not share:
        return frozenset()
    if clients < 2:
        raise ConfigError(broken("federation.held_out", "be 0 where there is only one client", share))
    count = min(max(1, round_half_up(share * clients)), clients - 1)
    return frozenset(torch.randperm(clients, generator=stream(seed, 0, SERVER, "held_out"))[:count].tolist())


def round_half_up(value: float) -> int:
    return int(value + 0.5)


def is_evaluated(round: int, settings: FederationConfig) -> bool:
    """Every k-th round, and each of the last n; the last round always."""
    return round % settings.evaluate_every == 0 or round > settings.rounds - max(1, settings.evaluate_last)


@dataclass
class Federation:
    """A run in progress. Its state is in the store; this object can be thrown away between any two rounds."""

    config: Config
    world: World
    method: Method
    engine: Engine
    store: RunStore
    observer: Observer
    afterwards: Callable[[int, Sequence[int], Callable[[int], Tensors]], None] | None = (
        None  #: called after the last round, with its number, the clients to test and what each receives
    )

    def run(self) -> None:
        """Every round that is still missing."""
        settings = self.config.federation
        server = self._load() or self._start()
        self.observer.started(self.config, self.world.client_names, server.round)
        label_check = self.store.fact("label_check")
        if label_check is not None:
            self.observer.checked(label_check)
        for round in range(server.round + 1, settings.rounds + 1):
            server = self._round(server, round)
        if self.afterwards is not None:
            self.afterwards(server.round, self.tested, self._downloads(server))
        self.observer.finished()

    @cached_property
    def participants(self) -> list[int]:
        """The clients that take part in training: all that are not held out."""
        return [client for client in range(self.world.clients) if client not in self.world.newcomers]

    @property
    def tested(self) -> list[int]:
        """The clients that are evaluated: those held out if there are any, else all."""
        return sorted(self.world.newcomers) or self.participants

    @cached_property
    def away(self) -> dict[int, range]:
        return absences(self.config.federation, self.world.client_names, self.world.newcomers)

    def _load(self) -> Server | None:
        row = self.store.server_state()
        if row is None:
            return None
        round, shared, own = row
        return Server(self._placed(wire.decode(shared)), self._placed(wire.decode(own)), round)

    def _start(self) -> Server:
        """Round 0: the initial tensors, and the statistics a method asks of every client beforehand."""
        roles, clock = self.world.roles, Clock()
        server = _in_order(Server(roles.shared, roles.server))
        sent: dict[int, int] = {}
        replies: list[Reply] = []
        if roles.statistics("start"):
            with clock.phase("survey"):
                replies = self._audited(self.engine.survey(self.participants, self._downloads(server, sent)), "start")
                server = _in_order(self.method.survey(self.world, server, self._uploads(replies)))
        bytes_up = sum(wire.size_in_bytes(reply.upload) for reply in replies)
        self._commit(server, RoundRecord(0, [], None, sum(sent.values()), bytes_up, None, clock.seconds), {})
        return server

    def _round(self, server: Server, round: int) -> Server:
        settings, clock = self.config.federation, Clock()
        away = {client for client, rounds in self.away.items() if round in rounds}
        cohort = sample_cohort(self.config.seed, round, self.participants, settings.fraction, away)
        self.observer.cohort(round, cohort)
        sent: dict[int, int] = {}
        with clock.phase("train"):
            arriving = self.engine.train(round, cohort, self._downloads(server, sent))
            replies = self._audited(self._watched(round, arriving), "round")
        with clock.phase("aggregate"):
            server = self.method.aggregate(self.world, server, self._uploads(replies), weighted_mean)
            server = _in_order(replace(server, round=round))
        results: dict[int, ClientResult] = {}
        if is_evaluated(round, settings):
            with clock.phase("evaluate"):
                for client, result in self.engine.evaluate(round, self.tested, self._downloads(server)):
                    results[client] = result
                    self.observer.evaluated(round, len(results), len(self.tested))
        trained = [reply for reply in replies if reply.loss is not None]
        samples = sum(reply.samples for reply in trained)
        record = RoundRecord(
            round=round,
            cohort=cohort,
            loss=sum((reply.loss or 0.0) * reply.samples for reply in trained) / samples if trained else None,
            bytes_down=sum(sent.values()),
            bytes_up=sum(wire.size_in_bytes(reply.upload) for reply in replies),
            summary=summarise(results[client] for client in sorted(results)) if results else None,
            seconds=clock.seconds,
        )
        self._commit(server, record, results)
        self.observer.committed(record)
        return server

    def _downloads(self, server: Server, sent: dict[int, int] | None = None) -> Callable[[int], Tensors]:
        """What each client receives, audited; `sent` notes how many bytes that was."""

        def download(client: int) -> Tensors:
            tensors = self.method.download(self.world, server, client)
            wire.audit_download(tensors, self.world.roles, self.world.client_names[client])
            if sent is not None:
                sent[client] = wire.size_in_bytes(tensors)
            return {name: tensor.detach() for name, tensor in tensors.items()}

        return download

    def _audited(self, replies: Iterable[Reply], when: str) -> list[Reply]:
        """Every reply held against the declared roles, in the order of clients whatever the order of arrival."""
        checked = []
        for reply in replies:
            wire.audit_upload(reply.upload, self.world.roles, self.world.client_names[reply.client], when)
            checked.append(reply)
        return sorted(checked, key=lambda reply: reply.client)

    def _uploads(self, replies: Sequence[Reply]) -> list[Upload]:
        uniform = self.config.federation.weighting == "uniform"
        weights = shares([1.0 if uniform else float(reply.samples) for reply in replies])
        return [Upload(reply.client, reply.upload, weight) for reply, weight in zip(replies, weights, strict=True)]

    def _watched(self, round: int, replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            self.observer.trained(round, reply)
            yield reply

    def _commit(self, server: Server, record: RoundRecord, results: dict[int, ClientResult]) -> None:
        evaluations = {client: results[client].to_json() for client in sorted(results)}
        self.store.commit(
            record, wire.encode(server.shared), wire.encode(server.own), self.engine.take_states(), evaluations
        )

    def _placed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.world.device) for name, tensor in tensors.items()}


def _in_order(server: Server) -> Server:
    """Names in the order in which they come back from the run file, so that a resumed run computes the same sums."""
    return replace(server, shared=wire.in_order(server.shared), own=wire.in_order(server.own))


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
