"""A run is one file: SQLite in WAL mode, one transaction a round, tensors as opaque safetensors bytes.

A process killed at any instant loses at most the round under way. A power cut may, besides, take what was committed within a second
after the last commit that waited for the disk: a second of work, which resuming repeats.
This module knows no torch, so that reading a run is instant.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TextIO

from fedprompt.errors import RunError, StorageError
from fedprompt.federation.run_tables import DAMAGE, RunTables

FILE = "run.db"
VERSION = 2
READABLE = (1, VERSION)  #: a run of version 1 has no pool of its own; it can be read, not resumed
MOST_ARGUMENTS = 500  #: of one query
INSERT_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?)"
WAIT_EVERY = 1.0  #: seconds, at least, between two commits that wait for the disk
LOCK_PAUSE = 0.2  #: seconds between two tries to become the one writer
REFUSED = "refused"  #: the kind of an event that tells of an update the guard kept out
RUN_ID = "run_id"  #: the fact of a run file whose clients are on nodes: what tells the run from all others there
UNTESTED = "untested"  #: the kind of event that tells why a client was not evaluated
PRIVACY = "privacy"  #: the kind of the event that tells what a round cost
SCHEMA = """
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rounds (
  round INTEGER PRIMARY KEY, cohort TEXT NOT NULL, loss REAL, bytes_down INTEGER NOT NULL, bytes_up INTEGER NOT NULL,
  summary TEXT, seconds TEXT NOT NULL);
CREATE TABLE evaluations (round INTEGER NOT NULL, client INTEGER NOT NULL, result TEXT NOT NULL, PRIMARY KEY (round, client)) WITHOUT ROWID;
CREATE TABLE client_states (client INTEGER PRIMARY KEY, round INTEGER NOT NULL, tensors BLOB NOT NULL);
CREATE TABLE server_state (only INTEGER PRIMARY KEY CHECK (only = 0), round INTEGER NOT NULL, shared BLOB NOT NULL, own BLOB NOT NULL);
CREATE TABLE events (round INTEGER NOT NULL, client INTEGER, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""
POOL_SCHEMA = """
CREATE TABLE pool (client INTEGER PRIMARY KEY, round INTEGER NOT NULL, kind TEXT NOT NULL, row BLOB NOT NULL);
CREATE TABLE pool_cells (only INTEGER PRIMARY KEY CHECK (only = 0), round INTEGER NOT NULL, centres BLOB NOT NULL);
"""


FACTS: dict[str, type] = {
    "config": dict,
    "manifest": dict,
    "versions": dict,
    "backbone": str,
    "clients": object,
    "index_lists": dict,
    "classes": list,
    "domains": list,
}  #: what a run writes down when it begins, and as what


@dataclass(frozen=True)
class RoundRecord:
    """One finished round. Round 0 is the state before any training."""

    round: int
    cohort: list[int]
    loss: float | None
    bytes_down: int
    bytes_up: int
    summary: dict[str, Any] | None  #: metrics over all clients, when the round was evaluated
    seconds: dict[str, float] = field(default_factory=dict)  #: by phase; the only thing two equal runs may differ in


@dataclass(frozen=True)
class Event:
    """Something worth knowing that is no figure of a round: whom it concerns, in a word what, and the rest as text or JSON."""

    client: int | None
    kind: str
    detail: str


@dataclass(frozen=True)
class PoolChange:
    """What a round changed in the pool: rows, each with its kind (see `federation.pool`), and perhaps the cells of its index."""

    rows: Mapping[int, tuple[str, bytes]] = field(default_factory=dict)
    centres: bytes | None = None  #: of cells that were made before the round, of the rows that were there then


class RunReader:
    """Read access to `run.db`; safe while another process writes."""

    versions: ClassVar[Sequence[int]] = READABLE

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / FILE if self.directory.suffix != ".db" else self.directory
        if not path.is_file():
            raise RunError(f"run: {str(path)!r} must be a run file, but there is none")
        self.directory = path.parent
        self._connection = self._open(path)
        try:
            self._tables = RunTables(self._connection, path, SCHEMA)
            self.version = self.fact("version")
            if self.version not in self.versions:
                known = " or ".join(str(version) for version in self.versions)
                raise RunError(f"run: {str(path)!r} must have format version {known}, got {self.version}")
            if self.version == VERSION:
                self._tables.require(POOL_SCHEMA)
        except BaseException:
            self._connection.close()
            raise

    def _open(self, path: Path) -> sqlite3.Connection:
        # SQLite wants files of its own beside a run; where none can be made nobody writes, and it can do without
        written = os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists()
        mode = "mode=ro" if written else "mode=ro&immutable=1"
        return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=30)

    def close(self) -> None:
        self._connection.close()

    def fact(self, key: str) -> Any:
        """What was written down when the run began; None where it was not."""
        for (value,) in self._tables.rows("SELECT value FROM facts WHERE key = ?", (str,), (key,)):
            return self._tables.plain(value, FACTS.get(key, object), f"fact {key!r}")
        return None

    def rounds(self) -> list[RoundRecord]:
        rows = self._tables.rows(
            "SELECT round, cohort, loss, bytes_down, bytes_up, summary, seconds FROM rounds ORDER BY round",
            (int, str, float | None, int, int, str | None, str),
        )
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
            for number, cohort, loss, down, up, summary, seconds in rows
        ]

    def evaluations(self, round: int) -> dict[int, dict[str, Any]]:
        """Per-client results of one round, by client number."""
        query = "SELECT client, result FROM evaluations WHERE round = ? ORDER BY client"
        return {
            client: self._tables.plain(result, dict, f"result of client {client} in round {round}")
            for client, result in self._tables.rows(query, (int, str), (round,))
        }

    def server_state(self) -> tuple[int, bytes, bytes] | None:
        for round, shared, own in self._tables.rows("SELECT round, shared, own FROM server_state", (int, bytes, bytes)):
            return round, shared, own
        return None

    def client_state(self, client: int) -> bytes | None:
        for (tensors,) in self._tables.rows("SELECT tensors FROM client_states WHERE client = ?", (bytes,), (client,)):
            return bytes(tensors)
        return None

    def client_states(self) -> Iterator[tuple[int, int, bytes]]:
        query = "SELECT client, round, tensors FROM client_states ORDER BY client"
        yield from self._tables.rows(query, (int, int, bytes))

    def pool_clients(self) -> list[int]:
        """Who has a row in the pool, by rising number."""
        if self.version < VERSION:
            return []
        return [client for (client,) in self._tables.rows("SELECT client FROM pool ORDER BY client", (int,))]

    def pool_rows(self, after: int, most: int) -> Iterator[tuple[int, int, str, bytes]]:
        """Client, round of the last change, kind and bytes of the rows that follow a client number."""
        query = "SELECT client, round, kind, row FROM pool WHERE client > ? ORDER BY client LIMIT ?"
        yield from self._tables.rows(query, (int, int, str, bytes), (after, most))

    def pool_chosen(self, clients: Sequence[int]) -> Iterator[tuple[int, str, bytes]]:
        """Those of the clients that have a row, in any order."""
        for start in range(0, len(clients), MOST_ARGUMENTS):
            part = clients[start : start + MOST_ARGUMENTS]
            query = f"SELECT client, kind, row FROM pool WHERE client IN ({', '.join('?' * len(part))})"
            yield from self._tables.rows(query, (int, str, bytes), part)

    def pool_cells(self) -> tuple[int, bytes] | None:
        """The cells of the pool's index, and the last round whose rows they were made of."""
        for round, centres in self._tables.rows("SELECT round, centres FROM pool_cells", (int, bytes)):
            return round, centres
        return None

    def events(self) -> list[tuple[int, int | None, str, str]]:
        query = "SELECT round, client, kind, detail FROM events ORDER BY rowid"
        rows = self._tables.rows(query, (int, int | None, str, str))
        return [(round, client, kind, detail) for round, client, kind, detail in rows]

    def details(self, wanted: str) -> list[dict[str, Any]]:
        """What the events of a kind that keeps mappings say, in their order."""
        found = [(round, detail) for round, _, kind, detail in self.events() if kind == wanted]
        return [self._tables.plain(detail, dict, f"event {wanted!r} of round {round}") for round, detail in found]


class RunStore(RunReader):
    """The one writer of a run. A lock on the directory keeps a second writer out."""

    versions: ClassVar[Sequence[int]] = (VERSION,)

    def __init__(self, directory: str | Path, lock: TextIO | None = None, patience: float = 0.0) -> None:
        """Another writer that is about to end is waited for, `patience` seconds."""
        self._lock = lock or _lock(Path(directory), patience)
        try:
            super().__init__(directory)
        except BaseException:
            self._lock.close()
            raise

    @classmethod
    def create(cls, directory: str | Path, facts: Mapping[str, Any], events: Sequence[Event] = ()) -> RunStore:
        """A new run file that is either complete or absent: it is built aside and renamed."""
        directory = Path(directory)
        with _disk(directory):
            directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory)
        try:
            if (directory / FILE).exists():
                raise RunError(f"run: {str(directory)!r} already holds a run")
            draft = directory / f"{FILE}.new"
            with _disk(directory):
                draft.unlink(missing_ok=True)
                with closing(sqlite3.connect(draft)) as connection, connection:
                    connection.executescript(SCHEMA + POOL_SCHEMA)
                    rows = [(key, json.dumps(value)) for key, value in {"version": VERSION, **facts}.items()]
                    connection.executemany("INSERT INTO facts VALUES (?, ?)", rows)
                    connection.executemany(INSERT_EVENT, _event_rows(0, events))
                for rest in ("wal", "shm"):  # of a deleted run file: SQLite would read its rounds into the new one
                    (directory / f"{FILE}-{rest}").unlink(missing_ok=True)
                os.replace(draft, directory / FILE)
        except BaseException:
            lock.close()
            raise
        return cls(directory, lock)

    def _open(self, path: Path) -> sqlite3.Connection:
        self._path = path.resolve()
        self._on_disk = -math.inf
        connection = sqlite3.connect(path, timeout=30, isolation_level=None)
        try:
            with _disk(path):
                self._identity = os.stat(path)
                connection.execute("PRAGMA journal_mode = WAL")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        super().close()
        self._lock.close()

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
        """Everything a round produced, in one transaction: all of it is there afterwards, or nothing is."""
        row = {
            name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in vars(record).items()
        }
        with _disk(self.directory), self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO rounds VALUES (:round, :cohort, :loss, :bytes_down, :bytes_up, :summary, :seconds)", row
            )
            cursor.execute("INSERT OR REPLACE INTO server_state VALUES (0, ?, ?, ?)", (record.round, shared, own))
            states = [(client, record.round, tensors) for client, tensors in client_states.items()]
            cursor.executemany("INSERT OR REPLACE INTO client_states VALUES (?, ?, ?)", states)
            results = [(record.round, client, json.dumps(result)) for client, result in evaluations.items()]
            cursor.executemany("INSERT INTO evaluations VALUES (?, ?, ?)", results)
            cursor.executemany(INSERT_EVENT, _event_rows(record.round, events))
            self._write_pool(cursor, record.round, pool or PoolChange())

    def _write_pool(self, cursor: sqlite3.Cursor, round: int, change: PoolChange) -> None:
        rows = ((client, round, kind, row) for client, (kind, row) in change.rows.items())
        cursor.executemany("INSERT OR REPLACE INTO pool VALUES (?, ?, ?, ?)", rows)
        if change.centres is not None:
            cursor.execute("INSERT OR REPLACE INTO pool_cells VALUES (0, ?, ?)", (round - 1, change.centres))

    def note(self, round: int, client: int | None, kind: str, detail: str) -> None:
        """Something worth knowing that is no figure: who, when, what."""
        with _disk(self.directory), self._transaction() as cursor:
            cursor.execute(INSERT_EVENT, (round, client, kind, detail))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        """A commit survives the end of this process. That it also survives a power cut is waited for once a second at most."""
        self._require_same_file()
        cursor = self._connection.cursor()
        now = time.monotonic()
        waits = now - self._on_disk >= WAIT_EVERY
        cursor.execute(f"PRAGMA synchronous = {'FULL' if waits else 'NORMAL'}")
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
        """An open file outlives its name: without this, a run whose directory was removed would go on into nowhere."""
        try:
            same = os.path.samestat(os.stat(self._path), self._identity)
        except FileNotFoundError:
            same = False
        if not same:
            raise StorageError(f"run: {str(self._path)!r} was moved, removed or replaced while the run was on")


def _event_rows(round: int, events: Sequence[Event]) -> list[tuple[int, int | None, str, str]]:
    return [(round, event.client, event.kind, event.detail) for event in events]


def _lock(directory: Path, patience: float = 0.0) -> TextIO:
    """Held until closed; the operating system drops it when the process dies, however it dies."""
    end = time.monotonic() + patience
    with _disk(directory):
        handle = open(directory / "run.lock", "w")  # noqa: SIM115 - lives as long as the store
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end:
                handle.close()
                raise RunError(f"run: {str(directory)!r} is being written by another process") from error
            time.sleep(LOCK_PAUSE)
            continue
        return handle


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Disk trouble becomes one clear error, and so does a damaged file; the run file keeps its last committed round."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageError(f"output.directory must be writable and have room, got {str(path)!r}: {error}") from error
    except DAMAGE as error:
        raise RunError(f"run: {str(path)!r} is not a readable run file: {error}") from error
    except OSError as error:
        raise StorageError(
            f"output.directory must be writable and have room, got {str(path)!r}: {error.strerror}"
        ) from error
