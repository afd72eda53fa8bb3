"""How long each phase of a round takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedprompt.core.profiling_scope import scope


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with scope(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
