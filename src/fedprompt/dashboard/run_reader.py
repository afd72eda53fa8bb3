"""Reads a run file for the page: only new data, in one short transaction, without creating files next to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprompt.runs.final_figures import EVENT
from fedprompt.runs.run import Run
from fedprompt.runs.store import MOST_ARGUMENTS, PRIVACY, REFUSED, RoundRecord, RunReader
from fedprompt.runs.tables import FILE

BUSY = 2.0  # seconds to wait if SQLite is busy; the page asks again anyway
LOOK = 5.0  # seconds for one read; a longer one is reported as damage, so that one file cannot block the page
CHECKED = 2**26  # bytes up to which the structure of a file is checked at every read, in about 30 ms at most
DETAIL = 400  # characters of an event that are shown
FIGURES = {
    REFUSED: "rule",
    PRIVACY: "epsilon",
    EVENT: "summary",
}  # the field shown for events whose details are mappings
# SQLite reads standard JSON a hundred times faster; JSON with a NaN is read here
COUNTS: dict[str, type] = {
    "json_valid(result)": int,
    "iif(json_valid(result), json_extract(result, '$.correct'), NULL)": object,
    "iif(json_valid(result), json_extract(result, '$.samples'), NULL)": object,
}


@dataclass(frozen=True)
class NewRound:
    """A round since the last read."""

    round: int
    cohort: int
    """Number of clients."""
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
    detail: str
    """Its beginning."""
    figure: Any
    """The rule of a refusal, the epsilon of a cost, the figures of the final test."""


class LiveReader(RunReader):
    """One read of a run file: all data is from the same snapshot. Close it immediately."""

    seconds = LOOK
    checked_bytes = CHECKED

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._connection.execute("BEGIN")

    def _open(self, path: Path) -> sqlite3.Connection:
        # if the log is empty, no lock is needed, and SQLite creates no files next to it
        log = path.with_name(f"{FILE}-wal")
        mode = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
        return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=BUSY, isolation_level=None)

    def new_rounds(self, start: int) -> Iterator[NewRound]:
        """Rounds from a number on."""
        for row in self._tables.table("rounds", "WHERE round >= ? ORDER BY round", (start,)):
            number, cohort, loss, down, up, summary, seconds, _ = row
            figures = None if summary is None else self._tables.figures(summary, f"summary of round {number}")
            spent = self._tables.figures(seconds, f"seconds of round {number}")
            clients = cohort.count(",") + 1 if len(cohort) > len("[]") else 0  # much faster than parsing them
            yield NewRound(number, clients, loss, down, up, figures, spent)

    def new_events(self, after: int) -> Iterator[NewEvent]:
        """Events after a row number."""
        for row in self._tables.table("events", "WHERE rowid > ? ORDER BY rowid", (after,)):
            number, round, client, kind, detail = row
            name, figure = FIGURES.get(kind), None
            if name is not None:
                figure = self._tables.plain(detail, dict, f"event {kind!r} of round {round}").get(name)
            yield NewEvent(number, round, client, kind, detail[:DETAIL], figure)

    def complete(self, rounds: int, events: int) -> None:
        """Raise if the file has fewer or more of them than were read."""
        self._complete("rounds", rounds, lambda last: last.rounds)
        self._complete("events", events, lambda last: last.last_event)

    def accuracies(self, round: int, clients: Sequence[int] | None = None) -> dict[int, float]:
        """Accuracy by client number, of all or of some."""
        found: dict[int, float] = {}
        parts = (
            [clients[at : at + MOST_ARGUMENTS] for at in range(0, len(clients), MOST_ARGUMENTS)] if clients else [()]
        )
        for part in parts:
            some = f" AND client IN ({', '.join('?' * len(part))})" if part else ""
            rows = self._tables.table("evaluations", f"WHERE round = ?{some}", (round, *part), COUNTS)
            for _, client, text, valid, correct, samples in rows:
                what = f"result of client {client} in round {round}"
                if not valid:
                    result = self._tables.plain(text, dict, what)
                    correct, samples = result.get("correct"), result.get("samples")
                if type(correct) is not int or type(samples) is not int or not 0 <= correct <= samples != 0:
                    raise self._tables.damaged(what, "be counts")
                found[client] = correct / samples
        return found


class LiveRun(Run):
    """A run for the tables of the other commands."""

    reader: LiveReader

    def __init__(self, directory: Path) -> None:
        self.reader = LiveReader(directory)
        self.directory = self.reader.directory
        # read once: they do not change during one read, and tables need them repeatedly
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
