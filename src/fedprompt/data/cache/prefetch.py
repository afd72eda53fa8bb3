"""Work done ahead of time, by one thread in the background that never stands in the way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

WAITING = 8  # jobs that wait at most; when there are more, new ones are dropped


class Background:
    """Does jobs one after the other in a daemon thread, which is there only while there are any.

    A job that fails is forgotten: the caller that needs its result does the work itself, and gets the error then.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def ask(self, job: Callable[[], None]) -> bool:
        """Have a job done some time; False where too many wait already."""
        with self._changed:
            if len(self._jobs) >= WAITING:
                return False
            self._jobs.append(job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="fedprompt-ahead", daemon=True)
                self._thread.start()
            return True

    def wait(self) -> None:
        """Until nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            with suppress(Exception):
                job()


class Turns:
    """One at a time; who works ahead lets everybody else go first."""

    def __init__(self) -> None:
        self._busy = False
        self.waiting = 0  # those who do not work ahead
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, ahead: bool = False) -> Iterator[None]:
        with self._changed:
            self.waiting += not ahead
            try:
                self._changed.wait_for(lambda: not self._busy and not (ahead and self.waiting))
            finally:
                self.waiting -= not ahead
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
