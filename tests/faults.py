"""Faults to plant in a `fedprompt` that `warm_processes` starts: a SIGKILL, a limit of the operating system, a disk without room."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

from warm_processes import LONGEST

# -- kills ------------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """One pass through one part of a run, counted in calls and returns of functions since its start."""

    phase: str
    turn: int  # how many passes through this part came before
    first: int
    last: int


class _Steps:
    """Counts every call and return of a function, those of C functions too, and knows which part of the run it is in."""

    def __init__(self, moment: Moment | None, step: int, notes: Path) -> None:
        self.count = 0
        self.inside: list[str] = []
        self.moments: list[Moment] = []
        self._turns: Counter[str] = Counter()
        self._moment, self._step, self._notes = moment, step, notes
        self._fatal: int | None = None

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.count += 1
        if self._fatal is not None and self.count >= self._fatal:
            self._notes.write_text(json.dumps(self.inside))
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self) -> None:
        sys.setprofile(None)
        self._notes.write_text(json.dumps(self.moments))

    @contextmanager
    def part(self, phase: str) -> Iterator[None]:
        self.inside.append(phase)
        first, turn = self.count, self._turns[phase]
        self._turns[phase] += 1
        if self._moment is not None and (phase, turn) == self._moment[:2]:
            self._fatal = first + self._step - self._moment.first
        try:
            yield
        finally:
            self.moments.append(Moment(phase, turn, first, self.count))
            self.inside.pop()


def count_steps(notes: Path) -> None:
    """Plant: write down when each part of the run took place."""
    steps = _watch(_Steps(None, 0, notes))
    Finalize(None, steps.save, exitpriority=1)  # a forked process does not run `atexit`


def kill_at(moment: Moment, step: int, notes: Path) -> None:
    """Plant: SIGKILL at that step of such a moment, counted from its beginning, since what comes before it may take a few
    steps more or less elsewhere; after writing down which part of the run it is in.
    """
    _watch(_Steps(moment, step, notes))


def _watch(steps: _Steps) -> _Steps:
    from fedprompt.client.factory import ExperimentFactory
    from fedprompt.data.cache.pixel_store import ImageStore
    from fedprompt.federation.phases import Clock
    from fedprompt.runs.store import RunStore

    for owner, name, phase in (
        (ExperimentFactory, "prepare", "start-up"),
        (ImageStore, "_fill", "cache write"),
        (RunStore, "commit", "commit"),
    ):
        setattr(owner, name, _told(getattr(owner, name), steps, phase))
    create = RunStore.create.__func__  # type: ignore[attr-defined]
    RunStore.create = classmethod(_told(create, steps, "creation"))  # type: ignore[method-assign, assignment]
    transaction, phase = RunStore._transaction, Clock.phase

    @contextmanager
    def told_transaction(self: RunStore) -> Iterator[Any]:
        with steps.part("transaction"), transaction(self) as cursor:
            yield cursor

    @contextmanager
    def told_phase(self: Clock, name: str) -> Iterator[None]:  # training, aggregation and evaluation time themselves
        with steps.part(name), phase(self, name):
            yield

    RunStore._transaction = told_transaction  # type: ignore[method-assign]
    Clock.phase = told_phase  # type: ignore[method-assign]
    sys.setprofile(steps)
    return steps


def _told(function: Callable[..., Any], steps: _Steps, phase: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        with steps.part(phase):
            return function(*args, **kwargs)

    return told


# -- disks, clocks, company -------------------------------------------------------------------------------------------


def little_room(room: int, round: int | None, deadly: bool = False, checkpoint: bool = False) -> None:
    """Plant: from the commit of a round on, SQLite's log cannot grow by more than `room` bytes. Without a round, no file can ever.

    A write beyond that fails or, where it is `deadly`, ends the process when half of it is done. With `checkpoint` it is the run file
    that cannot grow, while the log is moved into it after the commit.
    """
    from fedprompt.runs.store import RunStore

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if round is None:
        _limit(room)
        return
    commit = RunStore.commit

    @functools.wraps(commit)
    def commit_without_room(self: RunStore, record: Any, *args: Any, **kwargs: Any) -> None:
        path = self.directory / "run.db"
        if record.round == round and not checkpoint:
            _limit(path.with_name("run.db-wal").stat().st_size + room)
        commit(self, record, *args, **kwargs)
        if record.round == round and checkpoint:
            _limit(path.stat().st_size + room)
            self._connection.execute("PRAGMA wal_checkpoint")

    RunStore.commit = commit_without_room  # type: ignore[method-assign]


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def jumping_clock() -> None:
    """Plant: the time of day leaps by years, back and forth, at every look at it."""
    true_time, true_nanoseconds, looks = time.time, time.time_ns, iter(range(10**9))

    def leap() -> int:
        return (-1) ** next(looks) * 10 * 365 * 24 * 3600

    time.time = lambda: true_time() + leap()
    time.time_ns = lambda: true_nanoseconds() + leap() * 10**9


def wait_after_round(round: int, here: Path, go: Path) -> None:
    """Plant: after that round was committed, say so and go on when told."""
    from fedprompt.runs.store import RunStore

    commit = RunStore.commit

    @functools.wraps(commit)
    def commit_and_wait(self: RunStore, record: Any, *args: Any, **kwargs: Any) -> None:
        commit(self, record, *args, **kwargs)
        if record.round == round:
            here.touch()
            wait_for(go)

    RunStore.commit = commit_and_wait  # type: ignore[method-assign]


def wait_for(path: Path) -> None:
    for _ in range(LONGEST * 50):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path.name} must come")
