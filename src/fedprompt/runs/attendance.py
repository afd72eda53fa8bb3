"""Who was there: a client that sends no update is *absent*; one whose update breaks a rule is *refused*. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fedprompt.runs.store import REFUSED, UNTESTED, RunReader

ABSENT = frozenset({"absent", "deadline"})  # the rules under which events say that nothing came, or nothing in time


class Coverage(NamedTuple):
    """How many clients a figure is of, where some could not be tested."""

    tested: int
    of: int

    def sentence(self) -> str:
        return f"tested {self.tested} of {self.of} clients"


def rules(reader: RunReader) -> Counter[str]:
    """Updates that were not used, by rule."""
    return Counter(str(detail.get("rule")) for detail in reader.details(REFUSED))


def refusals(reader: RunReader) -> dict[str, int]:
    """Number of updates that the guard refused, by rule."""
    return {rule: count for rule, count in sorted(rules(reader).items()) if rule not in ABSENT}


def absences(reader: RunReader) -> int:
    """How often a client was in a cohort and sent nothing."""
    return sum(count for rule, count in rules(reader).items() if rule in ABSENT)


def coverage(reader: RunReader, rounds: Sequence[int]) -> Coverage | None:
    """The evaluation with the fewest clients among some rounds; None where every client was tested."""
    missing: dict[int, set[int | None]] = {}
    for round, client, kind, _ in reader.events():
        if kind == UNTESTED and round in rounds:
            missing.setdefault(round, set()).add(client)
    found = [Coverage(tested := len(reader.evaluations(each)), tested + len(who)) for each, who in missing.items()]
    return min(found, key=lambda each: each.tested / each.of, default=None)
