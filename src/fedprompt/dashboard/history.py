"""Rounds and events of a run in memory: numbers in columns, so that many long runs need little memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedprompt.dashboard.run_reader import NewEvent, NewRound
from fedprompt.metrics.accuracy import is_summary
from fedprompt.runs.attendance import ABSENT
from fedprompt.runs.final_figures import EVENT, RESULT
from fedprompt.runs.store import PRIVACY, REFUSED

LATEST = 100  # events that are shown
ELSEWHERE = (PRIVACY, RESULT, EVENT)  # events that are not: one in every round or of every client, and tiles
PACE = 20  # rounds whose mean time is used for the estimate
GROUPS = 200  # kinds, rules, phases and domains that are counted separately


@dataclass
class History:
    """Grows with the run."""

    rounds: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    """NaN if no client trained."""
    sent: array[float] = field(default_factory=lambda: array("d"))
    """Bytes in both directions, up to each round."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    evaluated: array[int] = field(default_factory=lambda: array("q"))
    average: array[float] = field(default_factory=lambda: array("d"))
    worst: array[float] = field(default_factory=lambda: array("d"))
    evaluated_sent: array[float] = field(default_factory=lambda: array("d"))
    bytes_up: int = 0
    bytes_down: int = 0
    cohort: int = 0
    """Clients of the last round."""
    phases: dict[str, float] = field(default_factory=dict)
    domains: dict[str, float] = field(default_factory=dict)
    """Of the last evaluated round."""
    last: NewRound | None = None
    last_event: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    absent: int = 0
    """How often a client that was picked sent no update."""
    latest: deque[NewEvent] = field(default_factory=lambda: deque(maxlen=LATEST))
    spent_rounds: array[int] = field(default_factory=lambda: array("q"))
    spent: array[float] = field(default_factory=lambda: array("d"))
    """Epsilon; infinite without noise."""
    final_test: tuple[int, float, float] | None = None
    """Round, Average and Worst Local of the test after the last round, where rounds are evaluated on validation images."""

    @property
    def done(self) -> int:
        return self.rounds[-1] if self.rounds else 0

    @property
    def pace(self) -> float:
        """Mean seconds of the last rounds."""
        late = self.seconds[1:][-PACE:]  # round 0 trains no client
        return sum(late) / len(late) if late else 0.0

    def add_rounds(self, rounds: Iterable[NewRound]) -> None:
        for each in rounds:
            self.bytes_up += each.bytes_up
            self.bytes_down += each.bytes_down
            self.rounds.append(each.round)
            self.losses.append(math.nan if each.loss is None else each.loss)
            self.sent.append(float(self.bytes_up + self.bytes_down))
            numbers = {name: value for name, value in each.seconds.items() if isinstance(value, int | float)}
            self.seconds.append(float(sum(numbers.values())))
            for phase, spent in numbers.items():
                if phase in self.phases or len(self.phases) < GROUPS:
                    self.phases[phase] = self.phases.get(phase, 0.0) + spent
            self.cohort, self.last = each.cohort, each
            if each.summary is not None and is_summary(each.summary):
                self.evaluated.append(each.round)
                self.average.append(each.summary["average"])
                self.worst.append(each.summary["worst"])
                self.evaluated_sent.append(self.sent[-1])
                self.domains = dict(list(each.summary["domains"].items())[:GROUPS])

    def add_events(self, events: Iterable[NewEvent]) -> None:
        for each in events:
            self.last_event = each.number
            if each.kind not in (RESULT, EVENT):
                _count(self.kinds, each.kind)
            if each.kind not in ELSEWHERE:
                self.latest.append(each)
            if each.kind == EVENT and isinstance(each.figure, dict) and is_summary(each.figure):
                self.final_test = (each.round, each.figure["average"], each.figure["worst"])
            if each.kind == REFUSED and str(each.figure) in ABSENT:
                self.absent += 1
            elif each.kind == REFUSED:
                _count(self.refused, str(each.figure))
            if each.kind == PRIVACY:
                self.spent_rounds.append(each.round)
                self.spent.append(float(each.figure) if isinstance(each.figure, int | float) else math.inf)


def _count(counts: Counter[str], name: str) -> None:
    counts[name if name in counts or len(counts) < GROUPS else "other"] += 1
