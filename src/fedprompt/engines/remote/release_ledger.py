"""One release per round: a node stores what it has sent and never sends anything else for the same round.

Updates of private runs and evaluations of all runs are stored here. Noise protects a client once: two answers for one round,
with different noise or from different starts, would reveal more than the budget allows. So a node stores its last answers.
It repeats the stored answer for the same request, for example after a crash of the server, and refuses a different request
for a round that it has answered.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from fedprompt.core import wire
from fedprompt.errors import RunError, StorageError
from fedprompt.io.bounded_read import read_bytes
from fedprompt.io.files import write_atomically
from fedprompt.tensors import Tensors

KEPT = 3  # rounds whose answers are stored; after a crash the server requests the last two again
MOST_BYTES = 2**34
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Entry:
    """The upload of a round, and the client's state after it."""

    packed: bytes
    state: Tensors


class Ledger:
    """The answers of one client in one run to one kind of request, as files of its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def answered(self, round: int, request: bytes) -> Entry | None:
        """The stored answer for a round; None for a round later than all answered rounds."""
        rounds = self._rounds()
        if round not in rounds:
            if any(round < other for other in rounds):
                raise RunError(f"round {round} must not come after round {max(rounds)} was answered")
            return None
        try:
            content = read_bytes(self._file(round, "answer"), MOST_BYTES)
            if content[:DIGEST_BYTES] != request:
                raise RunError(f"round {round} was answered already, to a different order")
            return Entry(content[DIGEST_BYTES:], wire.decode(read_bytes(self._file(round, "state"), MOST_BYTES)))
        except (OSError, ValueError) as error:
            raise StorageError(f"answer of round {round} cannot be read: {error}") from error

    def note(self, round: int, request: bytes, entry: Entry) -> None:
        """Store an answer before it is sent; old ones are deleted."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in (("state", wire.encode(entry.state)), ("answer", request + entry.packed)):
            write_atomically(self._file(round, name), content)
            os.chmod(self._file(round, name), 0o600)
        for old in self._rounds():
            if old <= round - KEPT:
                for name in ("answer", "state"):
                    self._file(old, name).unlink(missing_ok=True)

    def _rounds(self) -> list[int]:
        return sorted(int(file.stem) for file in self._directory.glob("*.answer"))

    def _file(self, round: int, name: str) -> Path:
        return self._directory / f"{round}.{name}"


def question(kind: str, received: Tensors, state: Tensors | None) -> bytes:
    """The digest of a request: the same received tensors and the same state give the same update, except for its noise."""
    total = hashlib.sha256(kind.encode())
    for tensors in (received, state or {}):
        blob = wire.encode(tensors)
        total.update(len(blob).to_bytes(8, "little") + blob)
    return total.digest()
