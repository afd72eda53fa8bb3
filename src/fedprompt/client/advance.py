"""How far some clients are, for what shows progress."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, float], None]  # what some clients do, how many they are, and the share that is done


class Advance:
    """Tells a listener, where there is one, the share of all steps that is done."""

    def __init__(self, listener: Listener | None, doing: str, clients: int, steps: int) -> None:
        self._listener, self._doing, self._clients, self._steps = listener, doing, clients, steps
        self._done = 0

    @property
    def done(self) -> int:
        """Steps so far; set back where some are to be done again."""
        return self._done

    @done.setter
    def done(self, steps: int) -> None:
        self._done = steps

    def add(self, steps: int) -> None:
        self._done += steps
        if self._listener is not None and self._steps:
            self._listener(self._doing, self._clients, min(self._done / self._steps, 1.0))
