"""Digests of a run file: one of every row, and one link of every transaction, each over the one before.

They tell of accidents and of edits by hand. They have no key: whoever changes a file on purpose can make them anew, all of them up to
the last link. Against that helps only a link that was noted elsewhere (`fedprompt verify --head`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

Value = int | float | str | bytes | None

BYTES = 16  # of a row's digest
NOTHING = bytes(BYTES)


def row_digest(table: str, values: Sequence[Value]) -> bytes:
    """Of a row: the table, and every value with its type and length, so that no two rows are written alike."""
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
    """Of rows in their order."""
    return hashlib.sha256(b"".join(digests)).digest()[:BYTES]


def facts_digest(facts: Mapping[str, str]) -> bytes:
    """Of the facts, as text by key."""
    return digest_of(row_digest("facts", (key, facts[key])) for key in sorted(facts))


def added(total: bytes, new: Iterable[bytes], old: Iterable[bytes] = ()) -> bytes:
    """The sum over all rows of a table in which rows were replaced. It needs none of the others."""
    number = int.from_bytes(total, "big")
    number += sum(int.from_bytes(each, "big") for each in new) - sum(int.from_bytes(each, "big") for each in old)
    return (number & ((1 << (8 * BYTES)) - 1)).to_bytes(BYTES, "big")


@dataclass(frozen=True)
class Link:
    """What a transaction wrote, and how it left the tables whose rows are replaced. Digests are in hexadecimal."""

    round: int | None = None
    """Of a transaction that ends a round."""
    rounds: int = 0
    """How many rounds there are."""
    record: str = ""
    """The digest of its row in `rounds`, which covers its evaluations."""
    last_event: int = 0
    """How many events there are."""
    events: str = ""
    """Over those of this transaction."""
    facts: str = ""
    """Over all facts, which never change."""
    server: str = ""
    """The digest of the server's state."""
    states: str = NOTHING.hex()
    """The sum over the clients' states."""
    pool: str = NOTHING.hex()
    """The sum over the rows of the pool."""
    cells: str = ""
    """The digest of the cells of the pool's index."""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Link:
        """From what `text` wrote; a ValueError where it is something else."""
        kinds = {each.name: type(each.default) for each in fields(cls)} | {"round": int | None}
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ValueError(f"must have exactly {', '.join(kinds)}")
        return cls(**values)


def chained(previous: bytes, text: str) -> bytes:
    """A link over the one before it; the first one is over nothing."""
    return hashlib.sha256(previous + text.encode()).digest()
