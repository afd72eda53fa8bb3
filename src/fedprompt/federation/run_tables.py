"""The tables of a run file, read with suspicion: whatever is not as it was written becomes a RunError that says what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

from fedprompt.errors import RunError
from fedprompt.reading import strict_json

#: what SQLite raises of a damaged file; the second where its own complaint quotes bytes of the file that are no text
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)


class RunTables:
    """Typed reading from an open SQLite file that has at least the tables of a schema."""

    def __init__(self, connection: sqlite3.Connection, path: Path, schema: str) -> None:
        self._connection, self._path = connection, path
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
        except DAMAGE as error:
            raise self._unreadable(error) from error
        self._check_length()
        self.require(schema)

    def rows(
        self, query: str, kinds: Sequence[type | UnionType], arguments: Sequence[object] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, each value of its kind: SQLite itself lets any column hold anything."""
        try:
            for row in self._connection.execute(query, arguments):
                for value, kind in zip(row, kinds, strict=True):
                    if not isinstance(value, kind):
                        raise self._damaged(f"values of `{query}`", f"be {kinds}")
                yield row
        except DAMAGE as error:
            raise self._unreadable(error) from error

    def plain(self, text: str, kind: type, what: str) -> Any:
        """JSON of a kind; a list holds texts."""
        try:
            value = strict_json(text, finite=False)
        except ValueError as error:
            raise self._damaged(what, f"be JSON ({error})") from error
        items = value if kind is list and isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(item, str) for item in items):
            raise self._damaged(what, f"be a {kind.__name__}")
        return value

    def whole_numbers(self, text: str, what: str) -> list[int]:
        """A JSON list of integers."""
        values = self.plain(text, object, what)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self._damaged(what, "be a list of whole numbers")
        return values

    def figures(self, text: str, what: str) -> dict[str, Any]:
        """Numbers by name, some of them in groups."""
        values: dict[str, Any] = self.plain(text, dict, what)
        for name, value in values.items():
            group = value.values() if isinstance(value, dict) else [value]
            if not all(type(number) in (int, float) for number in group):
                raise self._damaged(f"{name!r} in {what}", "be a number, or numbers by name")
        return values

    def _check_length(self) -> None:
        """A file that was cut: SQLite itself would notice only when it needs a page that is gone."""
        ((pages, page_size),) = self.rows("SELECT * FROM pragma_page_count, pragma_page_size", (int, int))
        length, log = self._path.stat().st_size, self._path.with_name(f"{self._path.name}-wal")
        if length < pages * page_size and not (log.exists() and log.stat().st_size):  # the log may hold the other pages
            raise self._damaged(f"its length of {length} bytes", f"be {pages * page_size}")

    def require(self, schema: str) -> None:
        """Only plain tables, and those of the schema among them: a view or a virtual table runs what its author likes."""
        query = "SELECT type, name, rootpage FROM sqlite_master"
        for kind, name, page in self.rows(query, (str, str, int | None)):
            if kind not in ("table", "index") or not page:
                raise self._damaged(f"{kind} {name!r}", "be no part of it")
        for table, columns in _columns(schema).items():
            found = {name for (name,) in self.rows("SELECT name FROM pragma_table_info(?)", (str,), (table,))}
            if not columns <= found:
                raise self._damaged(f"table {table!r}", f"have the columns {', '.join(sorted(columns))}")

    def _unreadable(self, error: Exception) -> RunError:
        return RunError(f"run: {str(self._path)!r} is not a readable run file: {error}")

    def _damaged(self, what: str, rule: str) -> RunError:
        return RunError(f"run: {str(self._path)!r} is damaged: {what} must {rule}")


@cache
def _columns(schema: str) -> dict[str, set[str]]:
    """The columns of every table, as SQLite itself understands the schema."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema)
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: {row[1] for row in connection.execute(f"PRAGMA table_info({name})")} for name in names}
