"""Run files as an attacker makes them: changed rows under fitting digests, and b-trees without end."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedprompt.runs.digests import NOTHING, Link, added, chained, digest_of, facts_digest, row_digest
from fedprompt.runs.schema import COLUMNS, SCHEMAS
from fedprompt.runs.tables import FILE


@contextmanager
def forged(folder: Path) -> Iterator[sqlite3.Connection]:
    """A run file to be changed at will. Afterwards all digests are made anew: nothing in the file tells of the change."""
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        yield connection
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if {"links", *COLUMNS} <= tables:
            reseal(connection)


def reseal(connection: sqlite3.Connection) -> None:
    """Every digest of a run file, made of what is in it now."""
    digests: dict[str, dict[tuple[Any, ...], bytes]] = {}
    for table in ("evaluations", "rounds", *(set(COLUMNS) - {"evaluations", "rounds"})):
        if table == "rounds":
            _count_evaluations(connection, digests["evaluations"])
        names = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")} | {"rowid"}
        if not {*COLUMNS[table], "digest"} <= names:
            return
        digests[table] = {row: row_digest(table, row) for row in _rows(connection, table)}
        keys = " AND ".join(f"{name} IS ?" for name in COLUMNS[table])
        command = f"UPDATE {table} SET digest = ? WHERE {keys}"
        connection.executemany(command, [(digest, *row) for row, digest in digests[table].items()])
    before, done, events = b"", 0, list(digests["events"].items())
    facts = facts_digest(dict(connection.execute("SELECT key, value FROM facts"))).hex()
    for number, text in connection.execute("SELECT number, parts FROM links ORDER BY number").fetchall():
        values = json.loads(text)
        own = [digest for row, digest in events if done < row[0] <= values["last_event"]]
        done += len(own)
        record = [digest for row, digest in digests["rounds"].items() if row[0] == values["round"]]
        values |= {"events": digest_of(own).hex(), "facts": "" if number else facts}
        values["record"] = record[0].hex() if record and values["round"] is not None else ""
        for part, table in (("states", "client_states"), ("pool", "pool")):
            values[part] = added(NOTHING, digests[table].values()).hex()
        for part, table in (("server", "server_state"), ("cells", "pool_cells")):
            values[part] = next((digest.hex() for digest in digests[table].values()), "")
        text = Link(**{**values, "last_event": done}).text()
        before = chained(before, text)
        connection.execute("UPDATE links SET link = ?, parts = ? WHERE number = ?", (before, text, number))


def _rows(connection: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    order = "round, client" if table == "evaluations" else "rowid"
    return connection.execute(f"SELECT {', '.join(COLUMNS[table])} FROM {table} ORDER BY {order}").fetchall()


def _count_evaluations(connection: sqlite3.Connection, digests: dict[tuple[Any, ...], bytes]) -> None:
    for (round,) in connection.execute("SELECT round FROM rounds").fetchall():
        own = digest_of(digest for row, digest in digests.items() if row[0] == round)
        connection.execute("UPDATE rounds SET evaluations = ? WHERE round = ?", (own, round))


def as_version(folder: Path, version: int) -> None:
    """Write a run file anew as an older version of the package would have made it."""
    path = folder / FILE
    with closing(sqlite3.connect(path)) as connection:
        tables = {table: _rows(connection, table) for table in COLUMNS}
        facts = connection.execute("SELECT key, value FROM facts WHERE key != 'version'").fetchall()
    for old in folder.glob(f"{FILE}*"):
        old.unlink()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(SCHEMAS[version])
        connection.executemany("INSERT INTO facts VALUES (?, ?)", [("version", str(version)), *facts])
        for table, rows in tables.items():
            known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            names = [name for name in COLUMNS[table] if name in known | {"rowid"}]
            if known:
                marks = ", ".join("?" * len(names))
                cut = [row[: len(names)] for row in rows]
                connection.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", cut)


def endless(folder: Path, table: str) -> Path:
    """Let a table's tree have one leaf and eight levels above it, in each of which all children are the same page."""
    path = folder / FILE
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        query = "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?"
        (root,) = connection.execute(query, (table,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray(path.read_bytes())
    pages = len(content) // size
    content += content[(root - 1) * size : root * size]  # the leaf
    for level in range(8):
        page = _branch(pages + 1 + level, size)
        if level < 7:
            content += page
        else:
            content[(root - 1) * size : root * size] = page
    content[28:32] = struct.pack(">I", len(content) // size)
    path.write_bytes(content)
    return path


def _branch(child: int, size: int) -> bytes:
    cell = struct.pack(">I", child) + b"\x7f"
    count = (size - 12) // (len(cell) + 2)
    start = size - count * len(cell)
    places = b"".join(struct.pack(">H", start + place * len(cell)) for place in range(count))
    page = struct.pack(">BHHHBI", 5, 0, count, start, 0, child) + places
    return page.ljust(start, b"\0") + cell * count
