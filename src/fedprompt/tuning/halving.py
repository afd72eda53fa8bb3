"""Successive halving on rounds, with fixed numbers: every study of the same size trains the same number of rounds.

All N trials train until the first rung, a ninth of the rounds. The best third of them goes on from there until the second
rung, a third of the rounds, and the best third of those until the last round. How many go on does not depend on their
figures, so all methods get the same number of trials and of rounds. Only a trial that diverges takes less.
"""

from __future__ import annotations

import math

ETA = 3


def stops(rounds: int) -> list[int]:
    """The last round of every stage: about a ninth and a third of all rounds, and all."""
    found = (
        [math.ceil(rounds / ETA), rounds]
        if rounds < ETA**2
        else [math.ceil(rounds / ETA**2), math.ceil(rounds / ETA), rounds]
    )
    return sorted(set(found))


def counts(trials: int, rounds: int) -> list[int]:
    """How many trials every stage has."""
    found = [trials]
    for _ in stops(rounds)[1:]:
        found.append(math.ceil(found[-1] / ETA))
    return found


def planned_rounds(trials: int, rounds: int) -> int:
    """Rounds that a study trains in all, if no trial diverges."""
    ends = stops(rounds)
    return sum(
        count * (end - start) for count, start, end in zip(counts(trials, rounds), [0, *ends], ends, strict=False)
    )
