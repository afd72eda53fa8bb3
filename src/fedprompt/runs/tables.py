"""Reads the tables of an untrusted run file: everything that is not as it was written becomes a RunError with the reason.

Two checks come before any reading. The tables must be created by exactly the SQL of this package, so that the file cannot
contain triggers or views of an attacker. Every page of a table's tree must be used once, so that there is no more to read
than the length of the file. A query that takes much longer than that is stopped.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from fedprompt.errors import RunError
from fedprompt.io.bounded_read import strict_json
from fedprompt.runs.digests import row_digest
from fedprompt.runs.schema import COLUMNS, NEW_COLUMNS, READABLE, VERSION, definitions, plain_sql

FILE = "run.db"  # of a run, in its directory
# errors of SQLite for a damaged file; the second one if its message quotes bytes of the file that are not text
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
SECONDS, BYTES_PER_SECOND = (
    10.0,
    5e6,
)  # limit for one query: seconds, plus one second for each of this many bytes of the file
STEPS = 20_000  # steps of SQLite between two checks of the clock
MOST_TABLES = 50

Kind = type | UnionType
Result = TypeVar("Result")


class Clock:
    """How long SQLite has worked, for one query or for all. It has no reference to the connection, which refers to it."""

    def __init__(self, seconds: float, all_together: bool) -> None:
        self.seconds, self._all = seconds, all_together
        self._spent = 0.0
        self._since: float | None = None  # set during a measured operation
        self.over = False

    def new_query(self) -> None:
        self._spent, self.over = self._spent if self._all else 0.0, False

    def timed(self, work: Callable[[], Result]) -> Result:
        """Measure an operation."""
        begin = self._since = time.monotonic()
        try:
            return work()
        finally:
            self._spent, self._since = self._spent + time.monotonic() - begin, None

    def ring(self) -> bool:
        """Called regularly by SQLite: whether it has to stop. Never in the middle of a write."""
        if self._since is None:
            return False
        self.over = self._spent + time.monotonic() - self._since > self.seconds
        return self.over


class RunTables:
    """Typed reading from an open SQLite file that is a run file of some version."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        seconds: float | None = None,
        checked_bytes: float = float("inf"),
    ) -> None:
        """`seconds` is a limit for all queries together. Trees of files larger than `checked_bytes` are not checked."""
        self._connection, self._path = connection, path
        size = path.stat().st_size
        self._checking, self._in_order = size <= checked_bytes, set[str]()
        usual = SECONDS + size / BYTES_PER_SECOND
        self._clock = Clock(usual if seconds is None else seconds, seconds is not None)
        connection.set_progress_handler(self._clock.ring, STEPS)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
        except DAMAGE as error:
            raise self._unreadable(error) from error
        self._check_length()
        self.version = self._check_version()
        for name in ("facts", "links") if self.sealed else ("facts",):
            self.check_tree(name)

    @property
    def sealed(self) -> bool:
        """Whether rows have digests."""
        return self.version >= VERSION

    def rows(self, query: str, kinds: Sequence[Kind], arguments: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query with checked types: SQLite allows any type in any column."""
        for row in self._raw(query, arguments):
            if not _fit(row, kinds):
                raise self.damaged(f"values of `{query}`", f"be {kinds}")
            yield row

    def table(
        self,
        name: str,
        tail: str = "",
        arguments: Sequence[object] = (),
        extra: Mapping[str, Kind] | None = None,
        look_up: bool = False,
    ) -> Iterator[tuple[Any, ...]]:
        """Rows of a table with all columns of `COLUMNS`, checked against their digests; then the values of `extra` expressions.

        A lookup of single rows by key always ends, so it needs no check of the tree.
        """
        if not look_up:
            self.check_tree(name)
        for row, fits in self.checked_rows(name, tail, arguments, extra or {}):
            if not fits:
                raise self.damaged(f"a row of the table {name!r} ({_key(name, row)})", "be as it was written")
            yield row

    def checked_rows(
        self, name: str, tail: str = "", arguments: Sequence[object] = (), extra: Mapping[str, Kind] | None = None
    ) -> Iterator[tuple[tuple[Any, ...], bool]]:
        """The same rows, and whether each has the right types and matches its digest."""
        columns, extra = COLUMNS[name], extra or {}
        count, kinds = len(columns), (*columns.values(), *extra.values())
        absent = {} if self.sealed else NEW_COLUMNS.get(name, {})
        wanted = [absent.get(column, column) for column in columns] + list(extra)
        query = f"SELECT {', '.join(wanted)}{', digest' if self.sealed else ''} FROM {name} {tail}"
        for row in self._raw(query, arguments):
            values, digest = (row[:-1], row[-1]) if self.sealed else (row, None)
            fits = _fit(values, kinds)
            yield values, fits and (not self.sealed or digest == row_digest(name, values[:count]))

    def _raw(self, query: str, arguments: Sequence[object]) -> Iterator[tuple[Any, ...]]:
        self._clock.new_query()
        try:
            cursor = self._clock.timed(lambda: self._connection.execute(query, arguments))
            while (row := self._clock.timed(cursor.fetchone)) is not None:
                yield row
        except DAMAGE as error:
            raise self._unreadable(error) from error

    def plain(self, text: str, kind: type, what: str) -> Any:
        """JSON of a kind; a list contains texts."""
        try:
            value = strict_json(text, finite=False)
        except ValueError as error:
            raise self.damaged(what, f"be JSON ({error})") from error
        items = value if kind is list and isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(item, str) for item in items):
            raise self.damaged(what, f"be a {kind.__name__}")
        return value

    def whole_numbers(self, text: str, what: str) -> list[int]:
        """A JSON list of integers."""
        values = self.plain(text, object, what)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.damaged(what, "be a list of whole numbers")
        return values

    def figures(self, text: str, what: str) -> dict[str, Any]:
        """Numbers by name, some of them in groups."""
        values: dict[str, Any] = self.plain(text, dict, what)
        for name, value in values.items():
            group = value.values() if isinstance(value, dict) else [value]
            if not all(type(number) in (int, float) for number in group):
                raise self.damaged(f"{name!r} in {what}", "be a number, or numbers by name")
        return values

    def _check_length(self) -> None:
        """Raise for a truncated file: SQLite itself notices only when it needs a missing page."""
        ((pages, page_size),) = self.rows("SELECT * FROM pragma_page_count, pragma_page_size", (int, int))
        length, log = self._path.stat().st_size, self._path.with_name(f"{self._path.name}-wal")
        if length < pages * page_size and not (
            log.exists() and log.stat().st_size
        ):  # the log may contain the other pages
            raise self.damaged(f"its length of {length} bytes", f"be {pages * page_size}")

    def _check_version(self) -> int:
        """The version of the file. Its tables must be created by exactly the SQL of that version, with nothing else."""
        query = f"SELECT type, name, sql FROM sqlite_master LIMIT {MOST_TABLES}"
        found = {(kind, name): plain_sql(sql) for kind, name, sql in self.rows(query, (str, str, str | None))}
        facts = ("table", "facts")
        if found.get(facts) != definitions(VERSION)[facts]:
            raise self.damaged("table 'facts'", "be that of a run file")
        text = next((value for (value,) in self.rows("SELECT value FROM facts WHERE key = 'version'", (str,))), "null")
        version = self.plain(text, object, "fact 'version'")
        if type(version) is not int or version not in READABLE:
            raise RunError(f"run: {str(self._path)!r} must have format version {_either(READABLE)}, got {version}")
        expected = definitions(version)
        for kind, name in sorted({*found, *expected}):
            if (kind, name) not in expected:
                raise self.damaged(f"{kind} {name!r}", "not be part of it")
            if found.get((kind, name)) != expected[kind, name]:
                raise self.damaged(f"{kind} {name!r}", f"be that of format version {version}")
        return version

    def check_tree(self, name: str) -> None:
        """Check once that every page of a table is used once, so that reading it reads at most the length of the file."""
        if self._checking and name not in self._in_order:
            self._check_structure(f"PRAGMA quick_check({name})")
            self._in_order.add(name)

    def check_file(self) -> None:
        """The same for the whole file."""
        self._check_structure("PRAGMA quick_check(1)")

    def _check_structure(self, query: str) -> None:
        for (message,) in self.rows(query, (str,)):
            if message != "ok":
                raise self.damaged("its structure", f"be in order ({' '.join(message.split())[:200]})")

    def _unreadable(self, error: Exception) -> RunError:
        if self._clock.over:
            rule = f"be read within {self._clock.seconds:.0f} s, enough for its length"
            return self.damaged("its content", rule)
        return RunError(f"run: {str(self._path)!r} is not a readable run file: {error}")

    def damaged(self, what: str, rule: str) -> RunError:
        return RunError(f"run: {str(self._path)!r} is damaged: {what} must {rule}")


def _fit(values: Sequence[Any], kinds: Sequence[Kind]) -> bool:
    return all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True))


def _key(table: str, row: Sequence[Any]) -> str:
    """The key of a row, from its numbers."""
    names = [name for name, kind in COLUMNS[table].items() if kind is int and name not in ("only", "rowid")]
    named = dict(zip(COLUMNS[table], row, strict=False))
    return ", ".join(f"{name} {str(named[name])[:40]}" for name in names if name in ("round", "client"))


def _either(versions: Sequence[int]) -> str:
    *others, last = map(str, versions)
    return f"{', '.join(others)} or {last}" if others else last
