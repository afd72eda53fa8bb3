"""Digests of a run file: one for every row, and one link for every transaction, which includes the link before it.

They detect accidents and manual edits. They have no key: an attacker who changes a file can recompute all of them up to the
last link. Only a link that was noted elsewhere protects against that (`fedprompt verify --head`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

Value = int | float | str | bytes | None

BYTES = 16  # of a row's digest
NOTHING = bytes(BYTES)


def row_digest(table: str, values: Sequence[Value]) -> bytes:
    """Digest of a row: the table, and every value with its type and length, so that different rows give different bytes."""
    sha = hashlib.sha256(table.encode())
    for value in values:
        if isinstance(value, bytes):
            content = value
        elif isinstance(value, str):
            content = value.encode()
        else:
            content = repr(value).encode()
        sha.update(f"\n{type(value).__name__} {len(content)} ".encode())
        sha.update(content)
    return sha.digest()[:BYTES]


def digest_of(digests: Iterable[bytes]) -> bytes:
    """Digest of rows in their order."""
    return hashlib.sha256(b"".join(digests)).digest()[:BYTES]


def facts_digest(facts: Mapping[str, str]) -> bytes:
    """Digest of the facts, as text by key."""
    return digest_of(row_digest("facts", (key, facts[key])) for key in sorted(facts))


def added(total: bytes, new: Iterable[bytes], old: Iterable[bytes] = ()) -> bytes:
    """The sum over a table after some rows were replaced, computed from the old sum and these rows only."""
    number = int.from_bytes(total, "big")
    number += sum(int.from_bytes(each, "big") for each in new) - sum(int.from_bytes(each, "big") for each in old)
    return (number & ((1 << (8 * BYTES)) - 1)).to_bytes(BYTES, "big")


@dataclass(frozen=True)
class Link:
    """What a transaction wrote, and the state of the tables whose rows are replaced. Digests are in hexadecimal."""

    round: int | None = None
    """The round, if the transaction ends one."""
    rounds: int = 0
    """Number of rounds."""
    record: str = ""
    """The digest of its row in `rounds`, which covers its evaluations."""
    last_event: int = 0
    """Number of events."""
    events: str = ""
    """Digest of the events of this transaction."""
    facts: str = ""
    """Digest of all facts, which never change."""
    server: str = ""
    """The digest of the server's state."""
    states: str = NOTHING.hex()
    """The sum over the clients' states."""
    pool: str = NOTHING.hex()
    """The sum over the rows of the pool."""
    cells: str = ""
    """The digest of the cells of the pool's index."""

    def text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Link:
        """Parse the output of `text`; ValueError for anything else."""
        kinds = {each.name: type(each.default) for each in fields(cls)} | {"round": int | None}
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ValueError(f"must have exactly {', '.join(kinds)}")
        return cls(**values)


def chained(previous: bytes, text: str) -> bytes:
    """A link that includes the one before it; the first link has none before it."""
    return hashlib.sha256(previous + text.encode()).digest()
