"""A run file as the page reads it: only what is new, in one short transaction, without a trace beside the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprompt.federation.store import FILE, MOST_ARGUMENTS, PRIVACY, REFUSED, RoundRecord, RunReader
from fedprompt.run import Run

BUSY = 2.0  #: seconds to wait where SQLite itself needs the file for a moment; the page asks again anyway
DETAIL = 400  #: letters of an event that are shown


@dataclass(frozen=True)
class NewRound:
    """A round since the last look."""

    round: int
    cohort: int  #: how many clients
    loss: float | None
    bytes_down: int
    bytes_up: int
    summary: dict[str, Any] | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class NewEvent:
    number: int
    round: int
    client: int | None
    kind: str
    detail: str  #: its beginning
    figure: Any  #: the rule of a refusal, the epsilon of a cost


class LiveReader(RunReader):
    """One look at a run file: everything that is read is from the same moment. To be closed at once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._connection.execute("BEGIN")

    def _open(self, path: Path) -> sqlite3.Connection:
        # where all is in the file itself nothing needs to be locked, and SQLite makes no files of its own beside it
        log = path.with_name(f"{FILE}-wal")
        mode = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
        return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=BUSY, isolation_level=None)

    def new_rounds(self, start: int) -> Iterator[NewRound]:
        """Rounds from a number on."""
        query = (
            "SELECT round, json_array_length(cohort), loss, bytes_down, bytes_up, summary, seconds FROM rounds "
            "WHERE round >= ? ORDER BY round"
        )
        kinds = (int, int, float | None, int, int, str | None, str)
        for number, cohort, loss, down, up, summary, seconds in self._tables.rows(query, kinds, (start,)):
            figures = None if summary is None else self._tables.figures(summary, f"summary of round {number}")
            spent = self._tables.figures(seconds, f"seconds of round {number}")
            yield NewRound(number, cohort, loss, down, up, figures, spent)

    def new_events(self, after: int) -> Iterator[NewEvent]:
        """Events behind a row number."""
        query = (
            f"SELECT rowid, round, client, kind, substr(detail, 1, {DETAIL}), CASE kind "
            "WHEN ? THEN json_extract(detail, '$.rule') WHEN ? THEN json_extract(detail, '$.epsilon') END "
            "FROM events WHERE rowid > ? ORDER BY rowid"
        )
        kinds = (int, int, int | None, str, str, object)
        for row in self._tables.rows(query, kinds, (REFUSED, PRIVACY, after)):
            yield NewEvent(*row)

    def accuracies(self, round: int, clients: Sequence[int] | None = None) -> dict[int, float]:
        """Test accuracy by client number, of all or of some."""
        found: dict[int, float] = {}
        parts = (
            [clients[at : at + MOST_ARGUMENTS] for at in range(0, len(clients), MOST_ARGUMENTS)] if clients else [()]
        )
        for part in parts:
            # SQLite reads standard JSON a hundred times faster; what holds a NaN is read here
            query = (
                "SELECT client, valid, iif(valid, json_extract(result, '$.correct'), NULL), "
                "iif(valid, json_extract(result, '$.samples'), NULL), iif(valid, '', result) "
                "FROM (SELECT client, result, json_valid(result) AS valid FROM evaluations WHERE round = ?"
                + (f" AND client IN ({', '.join('?' * len(part))})" if part else "")
                + ")"
            )
            rows = self._tables.rows(query, (int, int, object, object, str), (round, *part))
            for client, valid, correct, samples, text in rows:
                what = f"result of client {client} in round {round}"
                if not valid:
                    result = self._tables.plain(text, dict, what)
                    correct, samples = result.get("correct"), result.get("samples")
                if type(correct) is not int or type(samples) is not int or not 0 <= correct <= samples != 0:
                    raise self._tables._damaged(what, "be counts")
                found[client] = correct / samples
        return found


class LiveRun(Run):
    """A run for the tables that every other command makes."""

    reader: LiveReader

    def __init__(self, directory: Path) -> None:
        self.reader = LiveReader(directory)
        self.directory = self.reader.directory
        # read once: in one look they stay as they are, and tables ask for them again and again
        self._rounds: list[RoundRecord] | None = None
        self._summary: dict[str, Any] | None = None

    def rounds(self) -> list[RoundRecord]:
        if self._rounds is None:
            self._rounds = super().rounds()
        return self._rounds

    def summary(self) -> dict[str, Any]:
        if self._summary is None:
            self._summary = super().summary()
        return self._summary
