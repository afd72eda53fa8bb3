"""One release in a round: what a node has sent, so that it sends nothing else when it is asked again.

Updates of private runs and evaluations of all runs are kept here. Noise protects a client once: a server that could have the same
round answered twice, with other noise or from another start, would learn more than the budget says. So a node keeps its last
answers. Asked the same again, as a server does that was killed before it could commit, it gives the same answer; asked
something else for a round that it has answered, it refuses.
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

KEPT = 3  # rounds whose answers are kept; a server that was killed asks for the last two again
MOST_BYTES = 2**34
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Entry:
    """What was sent for a round, and what the client kept then."""

    packed: bytes
    state: Tensors


class Ledger:
    """The answers of one client in one run to one kind of question, as files of its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def answered(self, round: int, asked: bytes) -> Entry | None:
        """The answer that was given for a round; None for a round that comes after all that were answered."""
        rounds = self._rounds()
        if round not in rounds:
            if any(round < other for other in rounds):
                raise RunError(f"round {round} must not come after round {max(rounds)} was answered, once and for all")
            return None
        try:
            content = read_bytes(self._file(round, "answer"), MOST_BYTES)
            if content[:DIGEST_BYTES] != asked:
                raise RunError(f"round {round} was answered already, once and for all, to a different order")
            return Entry(content[DIGEST_BYTES:], wire.decode(read_bytes(self._file(round, "state"), MOST_BYTES)))
        except (OSError, ValueError) as error:
            raise StorageError(f"answer of round {round} cannot be read: {error}") from error

    def note(self, round: int, asked: bytes, entry: Entry) -> None:
        """Keep an answer before anybody hears of it; those of long ago are deleted."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in (("state", wire.encode(entry.state)), ("answer", asked + entry.packed)):
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
    """What an order asks, as a digest: the same start, received and kept, gives the same update but for its noise."""
    total = hashlib.sha256(kind.encode())
    for tensors in (received, state or {}):
        blob = wire.encode(tensors)
        total.update(len(blob).to_bytes(8, "little") + blob)
    return total.digest()
