"""The loop: sample, train, guard, aggregate, evaluate, commit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from fedprompt.config import Config, FederationConfig
from fedprompt.core import wire
from fedprompt.core.client_sampling import away_by_round, sample_attackers, sample_cohort, sample_tested
from fedprompt.core.messages import COHORT, Download, Failure, LocalUpdate, NextTraining, Training
from fedprompt.core.method import Combine, Method, Server, Upload, World, shares, without
from fedprompt.core.pool import Pool
from fedprompt.errors import ConfigError, DivergenceError, FedpromptError, QuorumError, broken
from fedprompt.federation.aggregate import rule
from fedprompt.federation.best_round import RoundChoice
from fedprompt.federation.guard import Admitted, Guard
from fedprompt.federation.observer import Observer
from fedprompt.federation.phases import Clock
from fedprompt.federation.staleness import decay, rebased
from fedprompt.federation.stored_pool import StoredRows
from fedprompt.federation.watch import Watch
from fedprompt.metrics.accuracy import ClientResult, summarise
from fedprompt.privacy import mechanism
from fedprompt.privacy.budget import Budget, Terms
from fedprompt.privacy.server_noise import ServerNoise
from fedprompt.runs.final_figures import final_figures, stored_test
from fedprompt.runs.store import LATE, PRIVACY, REFUSED, UNTESTED, WARNING, Event, RoundRecord, RunReader, RunStore
from fedprompt.tensors import Tensors

AfterLastRound = Callable[
    [int, Sequence[int], Download], None
]  # given the round, the clients to test, what each receives


class Engine(Protocol):
    """Where clients run. `download` gives the audited tensors of one client.

    `evaluate` gets the next training as `ahead`, so that an engine with remote clients can request both at once; it then
    has the replies when `train` is called. A client that cannot be evaluated is a failure.
    """

    def survey(self, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]: ...
    def train(self, round: int, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]: ...
    def evaluate(
        self, round: int, clients: Sequence[int], download: Download, ahead: NextTraining | None = None
    ) -> Iterator[tuple[int, ClientResult] | Failure]: ...
    def discard(self, clients: Iterable[int]) -> None: ...
    def take_states(self) -> dict[int, bytes]: ...


def is_evaluated(round: int, settings: FederationConfig) -> bool:
    """Every k-th round, and each of the last n; the last round always."""
    return round % settings.evaluate_every == 0 or round > settings.rounds - max(1, settings.last_rounds)


@dataclass
class Federation:
    """A run in progress. Its state is in the store; this object can be replaced between any two rounds."""

    config: Config
    world: World
    method: Method
    engine: Engine
    store: RunStore
    observer: Observer
    terms: Terms | None = None
    """Of differential privacy."""
    afterwards: AfterLastRound | None = None
    notes: Sequence[str] = ()
    """On defaults that were chosen."""

    secret: int | None = None
    """A seed that clients do not know, for runs in which the choice of clients and the server's noise are private."""

    @property
    def seed(self) -> int:
        """The seed of the server's random draws."""
        return self.config.seed if self.secret is None else self.secret

    def run(self) -> None:
        """Every round that is still missing."""
        settings = self.config.federation
        stored = self._load()
        self.observer.started(self.config, self.world.client_names, stored.round if stored else 0)
        for sentence in self.notes:
            self.observer.noted(sentence)
        label_check = self.store.fact("label_check")
        if label_check is not None:
            self.observer.checked(label_check)
        server = stored or self._start()
        self.choice.committed(server.round, None)
        for round in range(server.round + 1, settings.rounds + 1):
            if self.choice.is_over:
                break
            if not self._affords(round):
                if not server.round:
                    raise self._no_room("round 1")
                self.observer.spent(round, self.budget.epsilon if self.budget else 0.0)
                break
            server = self._round(server, round)
        if self.afterwards is not None:
            server = self._chosen(server)
            self.afterwards(server.round, self.tested, self._downloads(server.for_clients(self.tested)))
        history = [{"round": each.round, **each.summary} for each in self.store.rounds() if each.summary is not None]
        self.observer.concluded(final_figures(settings, history, stored_test(self.store)))
        self.observer.finished()

    @property
    def participants(self) -> Sequence[int]:
        return self.world.participants

    @cached_property
    def tested(self) -> Sequence[int]:
        """The clients that are evaluated: those held out if there are any, else all that are honest, or some of them."""
        attackers = sample_attackers(self.config.attack, self.config.seed, self.participants)
        everyone = sorted(self.world.newcomers) or without(self.participants, attackers)
        return sample_tested(self.seed, everyone, self.config.federation.evaluate_clients)

    @cached_property
    def picked(self) -> set[int]:
        """Clients that were in a cohort so far."""
        return {client for record in self.store.rounds() for client in record.cohort}

    @cached_property
    def pool_rows(self) -> StoredRows:
        return StoredRows(self.store, self.world)

    @cached_property
    def guard(self) -> Guard:
        roles = mechanism.as_sent(self.world.roles, self.config.privacy)
        return Guard(self.config.guard, roles, private=self.config.privacy is not None)

    @cached_property
    def budget(self) -> Budget | None:
        if self.terms is None:
            return None
        return Budget(self.config, self.terms, self.store.details(PRIVACY))

    @property
    def clip(self) -> float | None:
        """The bound on an update, where there is one."""
        return None if self.budget is None else self.budget.clip

    @cached_property
    def noise(self) -> ServerNoise | None:
        return None if self.terms is None else ServerNoise(self.config, self.world, self.terms, self.secret)

    @cached_property
    def watch(self) -> Watch:
        known = {detail.partition(": ")[0] for _, _, kind, detail in self.store.events() if kind == WARNING}
        return Watch(self.config, self.world, self.method, self.store.rounds(), known)

    @cached_property
    def combine(self) -> Combine:
        return rule(self.config.aggregation)

    @cached_property
    def away(self) -> Callable[[int], set[int]]:
        return away_by_round(self.config.federation, self.world.client_names, self.world.newcomers)

    @cached_property
    def choice(self) -> RoundChoice:
        return RoundChoice(self.config.federation, self.store)

    def _chosen(self, server: Server) -> Server:
        """The server after the round that counts: the last one, or the best one on validation images."""
        kept = self.choice.chosen(server.round)
        return server if kept is None else self._load(kept) or server

    def _load(self, stored: RunReader | None = None) -> Server | None:
        reader = stored or self.store
        row = reader.server_state()
        if row is None:
            return None
        round, shared, own = row
        kept = wire.require_like(wire.decode(shared), self.world.roles.shared, "stored shared tensors")
        rows = self.pool_rows if stored is None else StoredRows(stored, self.world)
        return Server(self._placed(kept), self._placed(wire.decode(own)), round, Pool(rows))

    def _start(self) -> Server:
        """Round 0: the initial tensors, and the statistics that a method collects from every client before round 1."""
        roles, clock = self.world.roles, Clock()
        server = _in_order(Server(roles.shared, roles.server, pool=Pool(self.pool_rows)))
        sent: dict[int, int] = {}
        admitted = Admitted([], [])
        events: list[Event] = []
        if roles.statistics("start"):
            if self.budget is not None and not self.budget.affords([], surveys=1):
                raise self._no_room("the survey before round 1")
            with clock.phase("survey"):
                replies = []
                for reply in self.engine.survey(self.participants, self._downloads(server, sent)):
                    replies.append(reply)
                    self.observer.surveyed(len(replies), len(self.participants))
                admitted = self._admit(replies, 0, self.participants, server)
                if not self._has_quorum(admitted, self.participants):
                    spent = [self.budget.survey()] if self.budget else []
                    raise self._no_quorum(0, self.participants, admitted, [*_events(admitted), *spent])
                uploads, _ = self._uploads(admitted.updates, server, "start")
                server = _in_order(self.method.survey(self.world, server, uploads))
            events += [self.budget.survey()] if self.budget else []
        record = RoundRecord(
            0, [], None, sum(sent.values()), self._bytes_up(admitted, self.participants), None, clock.seconds
        )
        return self._commit(server, record, {}, [*_events(admitted), *events])

    def _round(self, server: Server, round: int) -> Server:
        """Train, guard, aggregate, evaluate, commit."""
        clock = Clock()
        updates = self._collect_updates(server, round, clock)
        with clock.phase("aggregate"):
            server, aggregated = self._aggregate(server, round, updates)
        results, untested = self._evaluate(server, round, clock)
        record = RoundRecord(
            round=round,
            cohort=updates.cohort,
            loss=_mean_loss(updates.admitted.updates),
            bytes_down=updates.bytes_down,
            bytes_up=self._bytes_up(updates.admitted, updates.cohort),
            summary=self._summary(results, updates.cohort),
            seconds=clock.seconds,
        )
        samples = sum(result.samples for result in results.values())
        warnings = self.watch.look(record, server.shared, samples, updates.admitted.refused)
        noticed = [Event(None, WARNING, f"{each.rule}: {each.text}") for each in warnings]
        server = self._commit(server, record, results, [*updates.events, *aggregated, *untested, *noticed])
        self.observer.committed(record)
        self.choice.committed(round, record.summary)
        for each in warnings:
            self.observer.warned(round, each.text)
        return server

    def _summary(self, results: Mapping[int, ClientResult], cohort: Sequence[int]) -> dict[str, Any] | None:
        """The figures of a round, where it was evaluated; local tensors of clients that were never picked are untrained."""
        self.picked.update(cohort)
        if not results:
            return None
        ordered = {client: results[client] for client in sorted(results)}
        if not self.world.roles.local or self.world.newcomers:
            return summarise(ordered.values())
        return summarise(ordered.values(), [ordered[client] for client in ordered if client in self.picked])

    def _aggregate(self, server: Server, round: int, updates: RoundUpdates) -> tuple[Server, list[Event]]:
        """The server after the round, and events: capped weights and the privacy cost of the round."""
        uploads, capped = self._uploads(updates.admitted.updates, server, "round")
        if uploads:
            server = self._finite(self.method.aggregate(self.world, server, uploads, self.combine), round)
        events = [Event(each.client, "capped", each.value) for each in capped]
        if self.budget is not None:
            events += self._spent(round, updates)
        return _in_order(replace(server, round=round)), events

    def _evaluate(self, server: Server, round: int, clock: Clock) -> tuple[dict[int, ClientResult], list[Event]]:
        """Results by client if the round is evaluated, and the clients that could not be tested."""
        results: dict[int, ClientResult] = {}
        untested: list[Event] = []
        if not is_evaluated(round, self.config.federation) and self._affords(round + 1):
            return results, untested
        with clock.phase("evaluate"):
            downloads = self._downloads(server.for_clients(self.tested))
            following = partial(self._next_training, server, round + 1)
            for found in self.engine.evaluate(round, self.tested, downloads, following):
                if isinstance(found, Failure):
                    untested.append(Event(found.client, UNTESTED, f"{found.rule}: {found.value}"))
                    self.observer.untested(round, found)
                else:
                    results[found[0]] = found[1]
                    self.observer.evaluated(round, len(results), len(self.tested))
        return results, untested

    def _spent(self, round: int, updates: RoundUpdates) -> list[Event]:
        """The privacy cost of the round, committed with it. Sites see the model before that, so with sites it is written at once."""
        assert self.budget is not None
        assert self.noise is not None
        next_clip = self.noise.next_clip(updates.admitted.updates, round, self.clip)
        if self.secret is None:
            return [self.budget.round(updates.cohorts, next_clip)]
        cost = self.budget.round(updates.cohorts, None)
        self.store.note(round, cost.client, cost.kind, cost.detail)
        return [] if next_clip is None else [self.budget.move_clip(next_clip)]

    def _next_training(self, server: Server, round: int) -> Training | None:
        """The training of the next round, if there is one."""
        if round > self.config.federation.rounds or self.budget is not None:
            return None  # private updates are requested only after the previous round is committed
        cohort = self._cohort(round, 0)
        return Training(round, cohort, self._downloads(server.for_clients(cohort), None, self._moving_clip()))

    def _collect_updates(self, server: Server, round: int, clock: Clock) -> RoundUpdates:
        """The updates of a quorum. A round without one is tried again with another cohort, as often as the guard allows."""
        events: list[Event] = []
        cohorts: list[list[int]] = []
        sent: dict[int, int] = {}
        attempts = 1 + self.config.guard.repeats
        for attempt in range(attempts):
            cohort = self._cohort(round, attempt)
            if attempt and self.budget is not None and not self.budget.affords([*cohorts, cohort]):
                break
            self.observer.cohort(round, cohort)
            server = server.for_clients(cohort)
            with clock.phase("train"):
                replies = self._train(server, round, cohort, self._downloads(server, sent, self._moving_clip()))
            late = [reply.client for reply in replies if isinstance(reply, LocalUpdate) and reply.late]
            with clock.phase("guard"):
                admitted = self._admit(replies, round, [*cohort, *late], server)
            events += [*_events(admitted), *_late_events(admitted, self.config.federation.staleness)]
            cohorts.append(cohort)
            if self._has_quorum(admitted, cohort):
                accepted = {update.client for update in admitted.updates}
                self.engine.discard({each.client for each in admitted.refused} - accepted)
                return RoundUpdates(cohort, admitted, sum(sent.values()), tuple(events), cohorts)
            self.engine.discard([*cohort, *late])
            if attempt + 1 < attempts:
                events.append(Event(None, "repeated", f"{admitted.answered(cohort)} of {len(cohort)} updates accepted"))
        events += [self.budget.round(cohorts, None)] if self.budget else []
        raise self._no_quorum(round, cohorts[-1], admitted, events)

    def _train(
        self, server: Server, round: int, cohort: Sequence[int], download: Download
    ) -> list[LocalUpdate | Failure]:
        """One update or failure of every client of the cohort, in the order in which they arrive; and late updates."""
        replies: list[LocalUpdate | Failure] = []
        for reply in self.engine.train(round, cohort, download):
            if isinstance(reply, LocalUpdate):
                self.observer.trained(round, reply)
                if reply.late:
                    reply = rebased(reply, self.method.download(self.world, server, reply.client))
            replies.append(reply)
        return replies

    def _cohort(self, round: int, attempt: int) -> list[int]:
        settings, poisson = self.config.federation, self.config.federation.sampling == "poisson"
        away = self.away(round)
        return sample_cohort(self.seed, round, self.participants, settings.fraction, away, attempt, poisson)

    def _finite(self, server: Server, round: int) -> Server:
        """Raise if the aggregate of finite updates is not finite."""
        rows = {f"of client {client} in the pool": row for client, row in server.pool.pending.items()}
        for name, tensor in {**server.shared, **server.own, **rows}.items():
            if not wire.is_finite(tensor):
                raise DivergenceError(f"server tensor {name!r} after round {round} must be finite, got NaN or infinity")
        return server

    def _no_room(self, what: str) -> FedpromptError:
        most = self.config.privacy.max_epsilon if self.config.privacy else None
        return ConfigError(broken("privacy.max_epsilon", f"leave room for {what}", most))

    def _moving_clip(self) -> float | None:
        """The clipping bound to send to clients, if it changes during the run."""
        moves = self.config.privacy is not None and self.config.privacy.quantile is not None
        return self.clip if moves else None

    def _admit(
        self, replies: Sequence[LocalUpdate | Failure], round: int, cohort: Sequence[int], server: Server
    ) -> Admitted:
        def reference(client: int) -> Tensors:
            received = {} if client == COHORT else self.method.download(self.world, server, client)
            return wire.started_from(received, server.shared)

        admitted = self.guard.admit(replies, round, cohort, reference, self.config.federation.secure_sum)
        for each in admitted.refused:
            self.observer.refused(round, each)
        return admitted

    def _has_quorum(self, admitted: Admitted, cohort: Sequence[int]) -> bool:
        return admitted.answered(cohort) >= self.guard.quorum(cohort)

    def _no_quorum(
        self, round: int, cohort: Sequence[int], admitted: Admitted, events: Sequence[Event]
    ) -> FedpromptError:
        """The error that ends the run with its state intact; the events of the refused updates are stored."""
        for event in events:
            self.store.note(round, event.client, event.kind, event.detail)
        diverged = admitted.refused and all(each.rule == "finite" for each in admitted.refused)
        found = "; ".join(f"{self._name(each.client)}: {each.value}" for each in admitted.refused[:3])
        return (DivergenceError if diverged else QuorumError)(
            f"round {round} must have {self.guard.quorum(cohort)} accepted updates of {len(cohort)} (guard.quorum), "
            f"got {admitted.answered(cohort)}: {found}"
        )

    def _name(self, client: int) -> str:
        if client == COHORT:
            return "the cohort"
        return self.world.client_names[client] if 0 <= client < self.world.clients else f"client {client}"

    def _bytes_up(self, admitted: Admitted, cohort: Sequence[int]) -> int:
        """The bytes of the values of accepted updates; in a secure sum every number has eight bytes."""
        if self.config.federation.secure_sum:
            numbers = sum(tensor.numel() for update in admitted.updates for tensor in update.upload.values())
            return 8 * numbers * admitted.answered(cohort)
        return sum(wire.size_in_bytes(update.upload) for update in admitted.updates)

    def _downloads(self, server: Server, sent: dict[int, int] | None = None, clip: float | None = None) -> Download:
        """The audited download of each client, with `clip` if given; its bytes are added to `sent`."""

        before: tuple[Tensors, Tensors, int] | None = None  # what was asked for last, what became of it, and its bytes

        def download(client: int) -> Tensors:
            nonlocal before
            asked = self.method.download(self.world, server, client)
            if before is None or asked is not before[0]:
                found = audited(asked, client)
                before = asked, found, wire.size_in_bytes(found)
            if sent is not None:
                sent[client] = sent.get(client, 0) + before[2]
            return dict(before[1])

        def audited(asked: Tensors, client: int) -> Tensors:
            tensors = dict(asked)
            if clip is not None:
                tensors[mechanism.CLIP] = torch.tensor(clip, dtype=torch.float64)
            wire.audit_download(tensors, self.world.roles, self.world.client_names[client])
            return {name: tensor.detach() for name, tensor in tensors.items()}

        return download

    def _uploads(self, replies: Sequence[LocalUpdate], server: Server, when: str) -> tuple[list[Upload], list[Failure]]:
        """What the method aggregates, and the capped claims. With noise on sums it is one upload for all clients."""
        if self.noise is not None and self.noise.terms.settings.noise_at == "server":
            return [Upload(COHORT, self.noise.total(replies, server, when, self.clip), 1.0)], []
        if not replies:
            return [], []
        believed, capped = self.guard.weights(replies)
        uniform = self.method.weighs_evenly or self.config.federation.weighting == "uniform"
        kept = [decay(self.config.federation.staleness, reply.late) for reply in replies]
        weights = shares([(1.0 if uniform else images) * share for images, share in zip(believed, kept, strict=True)])
        uploads = [
            Upload(reply.client, self.guard.counted_as(reply.upload, images / reply.samples * share, when), weight)
            for reply, images, share, weight in zip(replies, believed, kept, weights, strict=True)
        ]
        return uploads, capped

    def _affords(self, round: int) -> bool:
        """Whether the privacy budget has room for this round."""
        if self.budget is None or round > self.config.federation.rounds:
            return True
        return self.budget.affords([self._cohort(round, 0)])

    def _commit(
        self, server: Server, record: RoundRecord, results: dict[int, ClientResult], events: Sequence[Event]
    ) -> Server:
        """The server after the round was written; rows of the pool are from then on read from the run file."""
        evaluations = {client: results[client].to_json() for client in sorted(results)}
        notes: list[str] = getattr(self.engine, "take_notes", list)()  # an engine of another package may have none
        events = [*events, *(Event(None, WARNING, f"memory: {text}") for text in notes)]
        shared, own, change = wire.encode(server.shared), wire.encode(server.own), self.pool_rows.change(server.pool)
        self.store.commit(record, shared, own, self.engine.take_states(), evaluations, events, change)
        for text in notes:
            self.observer.warned(record.round, text)
        return replace(server, pool=self.pool_rows.committed(server.pool))

    def _placed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.world.device) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class RoundUpdates:
    """The updates of a round."""

    cohort: list[int]
    admitted: Admitted
    bytes_down: int
    events: tuple[Event, ...]
    cohorts: list[list[int]]
    """One for each attempt; the last one is that of the round."""


def _events(admitted: Admitted) -> list[Event]:
    """Refused clients, for the run file."""
    return [
        Event(each.client, REFUSED, json.dumps({"rule": each.rule, "value": each.value})) for each in admitted.refused
    ]


def _late_events(admitted: Admitted, staleness: float) -> list[Event]:
    """Updates that came after their round and count in this one, for the run file."""
    return [
        Event(
            each.client,
            LATE,
            f"{each.late} round{'s' * (each.late > 1)} late: counts with {decay(staleness, each.late):.3g} of its weight",
        )
        for each in admitted.updates
        if each.late
    ]


def _mean_loss(replies: Sequence[LocalUpdate]) -> float | None:
    trained = [(reply.loss, reply.samples) for reply in replies if reply.loss is not None]
    samples = sum(count for _, count in trained)
    return sum(loss * count for loss, count in trained) / samples if trained else None


def _in_order(server: Server) -> Server:
    """Names in the order in which the run file returns them, so that a resumed run computes the same sums."""
    return replace(server, shared=wire.in_order(server.shared), own=wire.in_order(server.own))
