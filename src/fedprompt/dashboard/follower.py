"""Follows one run: data that was read stays in memory, and only new data is read."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedprompt.config import Config
from fedprompt.dashboard.discovery import Found
from fedprompt.dashboard.history import History
from fedprompt.dashboard.liveness import Locks, Signs, status
from fedprompt.dashboard.run_reader import LiveRun
from fedprompt.errors import FedpromptError
from fedprompt.runs.tables import FILE

PAUSE, SHARE = 0.2, 1.0  # pause between two reads of a run: seconds, or a multiple of the time of the last read
SETTLED = 0.1  # seconds after which a further change has a different timestamp


@dataclass(frozen=True)
class Signature:
    """Detects changes of a run file without opening it."""

    inode: int
    size: int
    modified: int
    """Nanoseconds."""
    log_size: int
    log_modified: int

    @classmethod
    def of(cls, directory: Path) -> Signature | None:
        """None if there is no file."""
        try:
            file = os.stat(directory / FILE)
        except OSError:
            return None
        try:
            log = os.stat(directory / f"{FILE}-wal")
            behind = (log.st_size, log.st_mtime_ns) if log.st_size else (0, 0)
        except OSError:
            behind = (0, 0)
        return cls(file.st_ino, file.st_size, file.st_mtime_ns, *behind)

    @property
    def changed(self) -> float:
        """When, in seconds since 1970."""
        return max(self.modified, self.log_modified) / 1e9


class Follower:
    """All data of one run for the page. Hold `lock` while reading its fields."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.lock = threading.RLock()
        self.config: Config | None = None
        self.history = History()
        self.reason: str | None = None  # why it cannot be read
        self.generation = 0  # goes up when the file was replaced by another one
        self.signature: Signature | None = None  # of the last read
        self._settled = False
        self._gate = threading.Lock()
        self._rested = float("-inf")  # when the next read may begin
        self._grown: float | None = None

    @property
    def read(self) -> bool:
        """Whether the run was read at all."""
        return self.signature is not None

    @contextmanager
    def opened(self) -> Iterator[LiveRun]:
        """The run, open for a moment.

        Reads never overlap, and the pause between two of them is at least as long as a read: SQLite resets its log only when
        there are no readers, so the log of a run that is always being read grows without end.
        """
        with self._gate:
            time.sleep(max(0.0, self._rested - time.monotonic()))
            begin = time.monotonic()
            try:
                with closing(LiveRun(self.found.path)) as run:
                    yield run
            finally:
                end = time.monotonic()
                self._rested = end + max(PAUSE, SHARE * (end - begin))

    def refresh(self) -> None:
        """Read new data. If another thread is reading, do not wait: the data in memory is used until the next time."""
        with self.lock:
            now, seen = time.monotonic(), Signature.of(self.found.path)
            if seen is None or (seen == self.signature and self._settled):
                return
            if self.read and (self._gate.locked() or now < self._rested):
                return
            if self.signature is not None and seen.inode != self.signature.inode:
                self._forget()
            before = self.history.done
            settled = time.time() - seen.changed > SETTLED
            try:
                self._read()
                self.reason = None
            except (FedpromptError, sqlite3.Error, OSError, UnicodeDecodeError) as error:
                if Signature.of(self.found.path) != seen or _is_busy(error):
                    return  # it changed during the read: try again next time
                self._forget()
                self.reason = str(error)
            if self.read and self.history.done > before:
                self._grown = now
            self.signature, self._settled = seen, settled

    def _read(self) -> None:
        known = self.history
        with self.opened() as run:
            config = run.config
            rounds = list(run.reader.new_rounds(known.done if known.last else 0))
            if known.last is not None and (not rounds or rounds[0] != known.last or config != self.config):
                self._forget()  # another run under the same name
                known, rounds = self.history, list(run.reader.new_rounds(0))
            elif known.last is not None:
                del rounds[0]
            events = list(run.reader.new_events(known.last_event))
            last = events[-1].number if events else known.last_event
            run.reader.complete(len(known.rounds) + len(rounds), last)
        self.config = config
        known.add_rounds(rounds)
        known.add_events(events)

    def _forget(self) -> None:
        self.history, self.config, self._grown = History(), None, None
        self.generation += 1

    @property
    def _complete(self) -> bool:
        """Whether nothing is missing; a run may end before its last round, but not without its final test."""
        if self.config is None:
            return False
        if self.config.federation.evaluate_on == "validation":
            return self.history.final_test is not None
        return self.history.done >= self.config.federation.rounds

    def status(self, locks: Locks) -> tuple[str, str]:
        """See `liveness.status`."""
        writer = locks.writer_of(self.found.path)
        if writer:
            self._grown = None  # growth is a sign of a writer only if none is visible
        now = time.monotonic()
        return status(
            Signs(
                damaged=self.reason is not None,
                complete=self._complete,
                writer=writer,
                grown=None if self._grown is None else now - self._grown,
                quiet=time.time() - self.signature.changed if self.signature else 0.0,
                pace=self.history.pace,
            )
        )


def _is_busy(error: BaseException | None) -> bool:
    """Whether SQLite was only busy."""
    while error is not None:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return True
        error = error.__cause__
    return False
