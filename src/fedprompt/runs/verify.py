"""Whether a run file is unchanged: checks every row against its digest, and every digest against the chain of links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedprompt.errors import RunError
from fedprompt.runs.digests import NOTHING, Link, added, chained, digest_of, row_digest
from fedprompt.runs.schema import COLUMNS
from fedprompt.runs.store import RunReader

MOST_PROBLEMS = 100  # that are reported
NO_ROW: tuple[tuple[Any, ...] | None, bool] = (None, False)


@dataclass(frozen=True)
class Problem:
    """A mismatch."""

    round: int | None
    """The round that wrote it; None if it was written before the first round."""
    what: str


@dataclass(frozen=True)
class Verdict:
    """The result for a readable run file."""

    version: int
    sealed: bool
    """Whether the file has digests; without them, only its structure and its types are checked."""
    rounds: int
    heads: dict[str, int | None]
    """The links in their order, in hexadecimal, each with the last round it covers."""
    problems: tuple[Problem, ...]
    """Ordered by round."""

    @property
    def head(self) -> str | None:
        """The last link, which covers the whole file."""
        return next(reversed(self.heads), None)


def verify(reader: RunReader) -> Verdict:
    """Check the whole file; RunError if its structure is damaged."""
    check = _Check(reader)
    reader._tables.check_file()
    if not reader.sealed:
        return Verdict(reader.version, False, len(reader.rounds()), {}, ())
    with reader._snapshot():
        problems = sorted(check.problems(), key=lambda problem: -1 if problem.round is None else problem.round)
    return Verdict(reader.version, True, check.rounds, check.heads, tuple(problems[:MOST_PROBLEMS]))


class _Check:
    def __init__(self, reader: RunReader) -> None:
        self._reader, self._tables = reader, reader._tables
        self.heads: dict[str, int | None] = {}
        self.rounds = 0
        self._links: list[tuple[Link, int | None]] = []  # with the last round each covers

    def problems(self) -> Iterator[Problem]:
        yield from self._facts()
        yield from self._chain()
        yield from self._records()
        yield from self._events()
        last, round = self._links[-1] if self._links else (Link(), None)
        yield from self._kept("client_states", last.states, round, summed=True)
        yield from self._kept("pool", last.pool, round, summed=True)
        yield from self._kept("server_state", last.server, round)
        yield from self._kept("pool_cells", last.cells, round)

    def _facts(self) -> Iterator[Problem]:
        try:
            self._reader.fact("version")
        except RunError as error:
            yield Problem(None, str(error))

    def _chain(self) -> Iterator[Problem]:
        """Every link includes the one before, and none is missing."""
        before, round = b"", None
        for place, (number, head, text) in enumerate(
            self._tables.rows("SELECT number, link, parts FROM links ORDER BY number", (int, bytes, str))
        ):
            try:
                link = Link.parse(self._tables.plain(text, dict, f"link {number}"))
            except (ValueError, RunError) as error:
                yield Problem(round, f"link {number}: {error}")
                return
            round = round if link.round is None else link.round
            if number != place or head != chained(before, text):
                yield Problem(round, f"link {number} does not follow from the one before it")
            before = head
            self.heads[head.hex()] = round
            self._links.append((link, round))
        if not self._links:
            yield Problem(None, "there is no chain of links")

    def _records(self) -> Iterator[Problem]:
        """Every round has its row and the results that this row covers."""
        written = {link.round: link.record for link, _ in self._links if link.round is not None}
        results = self._results()
        evaluated = next(results, None)
        for row, fits in self._tables.checked_rows("rounds", "ORDER BY round"):
            number = row[0] if isinstance(row[0], int) else None
            self.rounds += 1
            expected = None if number is None else written.pop(number, None)
            if not fits or row_digest("rounds", row).hex() != expected:
                yield Problem(number, "the row of `rounds` is not as it was written")
            digests: list[bytes] = []
            while evaluated is not None and (number is None or evaluated[0] <= number):
                if evaluated[0] == number:
                    digests = evaluated[1]
                else:
                    yield Problem(evaluated[0], "there are results of a round that was not written")
                evaluated = next(results, None)
            if digest_of(digests) != row[-1]:
                yield Problem(number, "the rows of `evaluations` are not those that were written")
        for number in written:
            yield Problem(number, "the row of `rounds` is missing")
        if evaluated is not None:
            yield Problem(evaluated[0], "there are results of a round that was not written")

    def _results(self) -> Iterator[tuple[int, list[bytes]]]:
        """The recomputed digests of the results of every round; without rows that do not match their own digest."""
        round, digests = None, []
        for row, fits in self._tables.checked_rows("evaluations", "ORDER BY round, client"):
            if row[0] != round and round is not None:
                yield round, digests
                digests = []
            round = row[0]
            digests.append(row_digest("evaluations", row) if fits else NOTHING)
        if round is not None:
            yield round, digests

    def _events(self) -> Iterator[Problem]:
        """Every transaction has the events it wrote."""
        rows = self._tables.checked_rows("events", "ORDER BY rowid")
        row, fits = next(rows, NO_ROW)
        for link, round in self._links:
            digests = []
            while row is not None and row[0] <= link.last_event:
                digests.append(row_digest("events", row) if fits else NOTHING)
                row, fits = next(rows, NO_ROW)
            if digest_of(digests).hex() != link.events:
                yield Problem(round, "the rows of `events` are not those that were written")
        if row is not None:
            yield Problem(self._links[-1][1] if self._links else None, "there are events that were not written")

    def _kept(self, table: str, expected: str, last: int | None, summed: bool = False) -> Iterator[Problem]:
        """Tables with replaced rows match the last link."""
        total, found, reported = NOTHING, "", False
        place = list(COLUMNS[table]).index("round")
        for row, fits in self._tables.checked_rows(table):
            digest = row_digest(table, row)
            total, found = added(total, [digest]), digest.hex()
            if not fits:
                reported = True
                round = row[place] if isinstance(row[place], int) else last
                yield Problem(round, f"a row of `{table}` is not as it was written")
        if not reported and (total.hex() if summed else found) != expected:
            yield Problem(last, f"the rows of `{table}` are not those that were written last")
