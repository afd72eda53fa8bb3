"""How long a part of a round takes, from the share of it that is done."""

from __future__ import annotations

LONG = 30.0  # seconds after which one step alone is enough for an estimate


class Pace:
    """The first step counts only where there is no other: it also loads what later steps find in memory."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._first: tuple[float, float] | None = None  # share and time
        self._last = (0.0, begin)

    @property
    def share(self) -> float:
        return self._last[0]

    def reached(self, share: float, now: float) -> None:
        if share > self._last[0]:
            self._first = self._first or (share, now)
            self._last = (share, now)

    def whole(self) -> float | None:
        """Seconds of the whole part; None as long as nothing can be said."""
        if self._first is None:
            return None
        (share, since), (done, now) = self._first, self._last
        if done > share and now > since:
            return (now - since) / (done - share)
        return (since - self._begin) / share if since - self._begin >= LONG else None


def as_time(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"
