"""A run is one file: SQLite in WAL mode, one transaction a round, tensors as opaque safetensors bytes.

A process killed at any instant loses at most the current round. A power cut may also lose commits of the second after the last
commit that waited for the disk; resuming repeats that work. Every row has a digest, and every transaction adds a link to a chain
over all of them (`fedprompt.runs.digests`). Every row is checked against its digest when it is read.
This module is free of torch, so that reading a run is fast.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fedprompt.errors import RunError, StorageError
from fedprompt.runs.digests import Link, added, chained, digest_of, facts_digest, row_digest
from fedprompt.runs.lock import Lock, disk, locked
from fedprompt.runs.schema import COLUMNS, READABLE, SCHEMA, VERSION
from fedprompt.runs.tables import DAMAGE, FILE, RunTables

BEST = "best.db"  # the run file as it was after the best round, where `federation.select` is best
MOST_ARGUMENTS = 500  # of one query
WAIT_EVERY = 1.0  # seconds, at least, between two commits that wait for the disk
NO_DIGESTS = "no digests: made by an older version"  # shown for a file whose content cannot be checked
LATE = "late"  # the kind of event for an update that came after its round and counts in a later one
REFUSED = "refused"  # the kind of event for an update that the guard refused
RUN_ID = "run_id"  # the fact with the id of a run whose clients are on nodes
STREAMS = "streams"  # the fact with the edition of the run's random streams; absent in runs before edition 2
UNTESTED = "untested"  # the kind of event with the reason why a client was not evaluated
WARNING = "warning"  # the kind of event for a sign that training does not work: its rule, a colon, and a sentence
PRIVACY = "privacy"  # the kind of event with the privacy cost of a round


FACTS: dict[str, type] = {
    "config": dict,
    "manifest": dict,
    "versions": dict,
    "backbone": str,
    "clients": object,
    "index_lists": dict,
    "classes": list,
    "domains": list,
    STREAMS: int,
}  # facts that a run writes at its start, and their types


@dataclass(frozen=True)
class RoundRecord:
    """One finished round. Round 0 is the state before any training."""

    round: int
    cohort: list[int]
    loss: float | None
    bytes_down: int
    bytes_up: int
    summary: dict[str, Any] | None
    """Metrics over all clients, when the round was evaluated."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase; equal runs may differ only in this field."""


@dataclass(frozen=True)
class Event:
    """Information about a round that is not a metric: the client, the kind of event, and details as text or JSON."""

    client: int | None
    kind: str
    detail: str


@dataclass(frozen=True)
class PoolChange:
    """Changes of the pool in a round: rows, each with its kind (see `federation.stored_pool`), and optionally the cells of its index."""

    rows: Mapping[int, tuple[str, bytes]] = field(default_factory=dict)
    centres: bytes | None = None
    """The round whose rows the cells were computed from, if earlier than this round."""


class RunReader:
    """Read access to `run.db`; safe while another process writes."""

    versions: ClassVar[Sequence[int]] = READABLE
    seconds: ClassVar[float | None] = (
        None  # limit for all queries together; None: a limit per query, by the length of the file
    )
    checked_bytes: ClassVar[float] = math.inf  # the structure of files up to this size is checked before reading

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / FILE if self.directory.suffix != ".db" else self.directory
        if not path.is_file():
            raise RunError(f"run: {str(path)!r} must be a run file, but it does not exist")
        self.directory = path.parent
        self._connection = self._open(path)
        try:
            self._tables = RunTables(self._connection, path, self.seconds, self.checked_bytes)
            self.version = self._tables.version
            if self.version not in self.versions:
                raise self.cannot_be_resumed()
        except BaseException:
            self._connection.close()
            raise

    def cannot_be_resumed(self) -> RunError:
        """What is wrong with resuming a run of an older format."""
        return RunError(
            f"run: {str(self.directory / FILE)!r} must have format version {VERSION} to go on, got {self.version}: it can be "
            "read; give the new run another name="
        )

    def _open(self, path: Path) -> sqlite3.Connection:
        # SQLite needs extra files next to a run; if the directory is read-only there is no writer, and they are not needed
        written = os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists()
        mode = "mode=ro" if written else "mode=ro&immutable=1"
        return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=30)

    def close(self) -> None:
        self._connection.close()

    @property
    def sealed(self) -> bool:
        """Whether the file has digests, so that changes after writing are detected."""
        return self._tables.sealed

    @cached_property
    def _facts(self) -> dict[str, str]:
        """All facts as JSON, checked against the first link. They are written once, when the file is created."""
        with self._snapshot():
            facts = dict(self._tables.rows("SELECT key, value FROM facts", (str, str)))
            if self.sealed and facts_digest(facts).hex() != self._link("WHERE number = 0").facts:
                raise self._tables.damaged("its facts", "be as they were written")
        return facts

    def fact(self, key: str) -> Any:
        """A fact that was written at the start of the run; None if absent."""
        text = self._facts.get(key)
        return None if text is None else self._tables.plain(text, FACTS.get(key, object), f"fact {key!r}")

    def _link(self, tail: str) -> Link:
        for number, text in self._tables.rows(f"SELECT number, parts FROM links {tail}", (int, str)):
            try:
                return Link.parse(self._tables.plain(text, dict, f"link {number}"))
            except ValueError as error:
                raise self._tables.damaged(f"link {number}", str(error)) from error
        raise self._tables.damaged("the chain of its links", "be there")

    def last_link(self) -> Link | None:
        """The link of the last transaction; None in files without digests."""
        return self._link("ORDER BY number DESC LIMIT 1") if self.sealed else None

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """All reads inside see the same snapshot."""
        if self._connection.in_transaction:
            yield
            return
        try:
            self._connection.execute("BEGIN")
        except DAMAGE as error:
            raise RunError(f"run: {str(self.directory / FILE)!r} is not a readable run file: {error}") from error
        try:
            yield
        finally:
            if self._connection.in_transaction:
                with suppress(*DAMAGE):  # SQLite may refuse after it found damage, and that error is already reported
                    self._connection.execute("ROLLBACK")

    def _complete(self, what: str, found: int, expected: Callable[[Link], int]) -> None:
        """Raise if the number of rows is not that of the last transaction."""
        last = self.last_link()
        if last is not None and found != expected(last):
            raise self._tables.damaged(f"the number of its {what}", f"be {expected(last)}, not {found}")

    def rounds(self) -> list[RoundRecord]:
        with self._snapshot():
            rows = list(self._tables.table("rounds", "ORDER BY round"))
            self._complete("rounds", len(rows), lambda last: last.rounds)
        return [
            RoundRecord(
                number,
                self._tables.whole_numbers(cohort, f"cohort of round {number}"),
                loss,
                down,
                up,
                None if summary is None else self._tables.figures(summary, f"summary of round {number}"),
                self._tables.figures(seconds, f"seconds of round {number}"),
            )
            for number, cohort, loss, down, up, summary, seconds, _ in rows
        ]

    def evaluations(self, round: int) -> dict[int, dict[str, Any]]:
        """Per-client results of one round, by client number."""
        with self._snapshot():
            rows = list(self._tables.table("evaluations", "WHERE round = ? ORDER BY client", (round,)))
            if self.sealed:
                self._check_evaluations(round, rows)
        return {
            client: self._tables.plain(result, dict, f"result of client {client} in round {round}")
            for _, client, result in rows
        }

    def _check_evaluations(self, round: int, rows: Sequence[tuple[Any, ...]]) -> None:
        """Raise if results of a round are missing or were added."""
        query = "SELECT evaluations FROM rounds WHERE round = ?"
        stored = next((digest for (digest,) in self._tables.rows(query, (bytes,), (round,))), digest_of(()))
        if digest_of(row_digest("evaluations", row) for row in rows) != stored:
            raise self._tables.damaged(f"the results of round {round}", "be those that were written")

    def server_state(self) -> tuple[int, bytes, bytes] | None:
        with self._snapshot():
            rows = list(self._tables.table("server_state"))
            last = self.last_link()
            if last is not None and "".join(row_digest("server_state", row).hex() for row in rows) != last.server:
                raise self._tables.damaged("the server's state", "be that of the last round")
        for _, round, shared, own in rows:
            return round, shared, own
        return None

    def client_state(self, client: int) -> bytes | None:
        for _, _, tensors in self._tables.table("client_states", "WHERE client = ?", (client,), look_up=True):
            return bytes(tensors)
        return None

    def client_states(self) -> Iterator[tuple[Any, ...]]:
        """Client, round of the last change and tensors of every client with a state."""
        yield from self._tables.table("client_states", "ORDER BY client")

    def pool_clients(self) -> list[int]:
        """Clients with a row in the pool, in ascending order."""
        if self.version < 2:
            return []
        self._tables.check_tree("pool")
        return [client for (client,) in self._tables.rows("SELECT client FROM pool ORDER BY client", (int,))]

    def pool_rows(self, after: int, most: int) -> Iterator[tuple[Any, ...]]:
        """Client, round of the last change, kind and bytes of the rows after a client number."""
        tail = "WHERE client > ? ORDER BY client LIMIT ?"
        yield from self._tables.table("pool", tail, (after, most))

    def pool_chosen(self, clients: Sequence[int]) -> Iterator[tuple[int, str, bytes]]:
        """The rows of these clients, if they have one, in any order."""
        for part, marks in _in_parts(clients):
            for client, _, kind, row in self._tables.table("pool", f"WHERE client IN ({marks})", part, look_up=True):
                yield client, kind, row

    def pool_cells(self) -> tuple[int, bytes] | None:
        """The cells of the pool's index, and the last round whose rows they were computed from."""
        for _, round, centres in self._tables.table("pool_cells"):
            return round, centres
        return None

    def events(self) -> list[tuple[int, int | None, str, str]]:
        with self._snapshot():
            rows = list(self._tables.table("events", "ORDER BY rowid"))
            self._complete("events", len(rows), lambda last: last.last_event)
        return [(round, client, kind, detail) for _, round, client, kind, detail in rows]

    def details(self, wanted: str) -> list[dict[str, Any]]:
        """The details of all events of a kind whose details are mappings, in their order."""
        found = [(round, detail) for round, _, kind, detail in self.events() if kind == wanted]
        return [self._tables.plain(detail, dict, f"event {wanted!r} of round {round}") for round, detail in found]


class RunStore(RunReader):
    """The only writer of a run. A lock on the directory prevents a second writer."""

    versions: ClassVar[Sequence[int]] = (VERSION,)

    def __init__(self, directory: str | Path, lock: Lock | None = None, patience: float = 0.0) -> None:
        """Waits up to `patience` seconds for another writer to end."""
        self._lock = lock or locked(Path(directory), patience)
        try:
            super().__init__(directory)
            try:
                self._number, self._head, self._last = self._end_of_chain()
            except BaseException:
                self._connection.close()
                raise
        except BaseException:
            self._lock.release()
            raise

    def _end_of_chain(self) -> tuple[int, bytes, Link]:
        """The last link, to continue from: its number, digest and content. It must include the link before it."""
        query = "SELECT number, link, parts FROM links ORDER BY number DESC LIMIT 2"
        (number, head, text), *before = [*self._tables.rows(query, (int, bytes, str)), (-1, b"", "")]
        if number < 0 or head != chained(before[0][1], text):
            raise self._tables.damaged("the chain of its links", "be unbroken")
        return number, head, self._link(f"WHERE number = {number}")

    @classmethod
    def create(cls, directory: str | Path, facts: Mapping[str, Any], events: Sequence[Event] = ()) -> RunStore:
        """A new run file that is either complete or absent: it is built under another name and renamed."""
        directory = Path(directory)
        with disk(directory):
            directory.mkdir(parents=True, exist_ok=True)
        lock = locked(directory)
        try:
            if (directory / FILE).exists():
                raise RunError(f"run: {str(directory)!r} already holds a run")
            draft = directory / f"{FILE}.new"
            with disk(directory):
                draft.unlink(missing_ok=True)
                (directory / BEST).unlink(missing_ok=True)  # of a deleted run
                with closing(sqlite3.connect(draft)) as connection, connection:
                    connection.executescript(f"BEGIN; {SCHEMA}")  # otherwise every table waits for the disk
                    texts = {key: json.dumps(value) for key, value in {"version": VERSION, **facts}.items()}
                    connection.executemany("INSERT INTO facts VALUES (?, ?)", texts.items())
                    first = Link(facts=facts_digest(texts).hex())
                    _write_events(connection.cursor(), first, b"", 0, 0, events)
                for rest in (
                    "wal",
                    "shm",
                ):  # leftovers of a deleted run file: SQLite would read its rounds into the new one
                    (directory / f"{FILE}-{rest}").unlink(missing_ok=True)
                os.replace(draft, directory / FILE)
        except BaseException:
            lock.release()
            raise
        return cls(directory, lock)

    def _open(self, path: Path) -> sqlite3.Connection:
        self._path = path.resolve()
        self._on_disk, self._level = -math.inf, ""
        connection = sqlite3.connect(path, timeout=30, isolation_level=None)
        try:
            with disk(path):
                self._identity = os.stat(path)
                connection.execute("PRAGMA journal_mode = WAL")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        super().close()
        self._lock.release()

    def commit(
        self,
        record: RoundRecord,
        shared: bytes,
        own: bytes,
        client_states: Mapping[int, bytes],
        evaluations: Mapping[int, Mapping[str, Any]],
        events: Sequence[Event] = (),
        pool: PoolChange | None = None,
    ) -> None:
        """Write all results of a round in one transaction: either all of them or none."""
        with disk(self.directory), self._transaction() as cursor:
            number = record.round
            results = [(number, client, json.dumps(evaluations[client])) for client in sorted(evaluations)]
            evaluated = digest_of(_insert(cursor, "evaluations", results))
            (recorded,) = _insert(cursor, "rounds", [_record_row(record, evaluated)])
            (server,) = _insert(cursor, "server_state", [(0, number, shared, own)], over=True)
            states = [(client, number, tensors) for client, tensors in client_states.items()]
            link = replace(
                self._last,
                round=number,
                rounds=self._last.rounds + 1,
                record=recorded.hex(),
                server=server.hex(),
                states=_replaced(cursor, "client_states", states, self._last.states),
                facts="",
            )
            link = self._write_pool(cursor, number, pool or PoolChange(), link)
            added_link = _write_events(cursor, link, self._head, self._number + 1, number, events)
        self._number, (self._head, self._last) = self._number + 1, added_link

    def _write_pool(self, cursor: sqlite3.Cursor, round: int, change: PoolChange, link: Link) -> Link:
        rows = [(client, round, kind, row) for client, (kind, row) in change.rows.items()]
        link = replace(link, pool=_replaced(cursor, "pool", rows, link.pool))
        if change.centres is None:
            return link
        (cells,) = _insert(cursor, "pool_cells", [(0, round - 1, change.centres)], over=True)
        return replace(link, cells=cells.hex())

    def note(self, round: int, client: int | None, kind: str, detail: str) -> None:
        """Write an event between rounds."""
        self.notes(round, [Event(client, kind, detail)])

    def notes(self, round: int, events: Sequence[Event]) -> None:
        """Write events between rounds in one transaction."""
        with disk(self.directory), self._transaction() as cursor:
            link = replace(self._last, round=None, record="", facts="")
            added_link = _write_events(cursor, link, self._head, self._number + 1, round, events)
        self._number, (self._head, self._last) = self._number + 1, added_link

    def keep_as_best(self) -> None:
        """Copy the file as it is now. The copy is complete or absent, and can be read like any run file."""
        draft = self.directory / f"{BEST}.new"
        with disk(self.directory):
            draft.unlink(missing_ok=True)
            with closing(sqlite3.connect(draft, isolation_level=None)) as copy:
                self._connection.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
            os.replace(draft, self.directory / BEST)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        """A commit survives the end of this process. Waiting for the disk, to survive a power cut, happens at most once a second."""
        self._require_same_file()
        cursor = self._connection.cursor()
        now = time.monotonic()
        waits = now - self._on_disk >= WAIT_EVERY
        level = "FULL" if waits else "NORMAL"
        if level != self._level:
            cursor.execute(f"PRAGMA synchronous = {level}")
            self._level = level
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
            cursor.execute("COMMIT")
            self._on_disk = now if waits else self._on_disk
        except BaseException:
            if self._connection.in_transaction:
                cursor.execute("ROLLBACK")
            raise

    def _require_same_file(self) -> None:
        """An open file survives its deletion: without this check, a run whose directory was removed would continue without a trace."""
        try:
            same = os.path.samestat(os.stat(self._path), self._identity)
        except FileNotFoundError:
            same = False
        if not same:
            raise StorageError(f"run: {str(self._path)!r} was moved, removed or replaced while the run was on")


def _record_row(record: RoundRecord, evaluated: bytes) -> tuple[Any, ...]:
    """A row of `rounds` as it will be read: SQLite stores NaN as NULL and every loss as a float."""
    loss = None if record.loss is None or math.isnan(record.loss) else float(record.loss)
    cohort, seconds = json.dumps(record.cohort), json.dumps(record.seconds)
    summary = None if record.summary is None else json.dumps(record.summary)
    return record.round, cohort, loss, record.bytes_down, record.bytes_up, summary, seconds, evaluated


def _insert(cursor: sqlite3.Cursor, table: str, rows: Sequence[tuple[Any, ...]], over: bool = False) -> list[bytes]:
    """Write rows with all of `COLUMNS`; returns their digests."""
    if not rows:
        return []
    digests = [row_digest(table, row) for row in rows]
    names = ", ".join([*COLUMNS[table], "digest"])
    marks = ", ".join("?" * (len(COLUMNS[table]) + 1))
    command = f"INSERT {'OR REPLACE ' if over else ''}INTO {table} ({names}) VALUES ({marks})"
    cursor.executemany(command, [(*row, digest) for row, digest in zip(rows, digests, strict=True)])
    return digests


def _replaced(cursor: sqlite3.Cursor, table: str, rows: Sequence[tuple[Any, ...]], total: str) -> str:
    """Write or replace rows by client; returns the new sum over the whole table."""
    old: list[bytes] = []
    for part, marks in _in_parts([client for client, *_ in rows]):
        old += [digest for (digest,) in cursor.execute(f"SELECT digest FROM {table} WHERE client IN ({marks})", part)]
    return added(bytes.fromhex(total), _insert(cursor, table, rows, over=True), old).hex()


def _write_events(
    cursor: sqlite3.Cursor, link: Link, before: bytes, number: int, round: int, events: Iterable[Event]
) -> tuple[bytes, Link]:
    """Write events, and then the link of the transaction with its other parts."""
    rows = [
        (place, round, event.client, event.kind, event.detail)
        for place, event in enumerate(events, start=link.last_event + 1)
    ]
    digest = digest_of(_insert(cursor, "events", rows)).hex()
    link = replace(link, last_event=link.last_event + len(rows), events=digest)
    text = link.text()
    head = chained(before, text)
    cursor.execute("INSERT INTO links (number, link, parts) VALUES (?, ?, ?)", (number, head, text))
    return head, link


def _in_parts(clients: Sequence[int]) -> Iterator[tuple[Sequence[int], str]]:
    """Clients in groups that fit into one query, with the same number of question marks."""
    for start in range(0, len(clients), MOST_ARGUMENTS):
        part = clients[start : start + MOST_ARGUMENTS]
        yield part, ", ".join("?" * len(part))
