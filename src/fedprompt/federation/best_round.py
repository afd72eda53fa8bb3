"""Which round is the best one on validation images, its parameters, and whether to go on."""

from __future__ import annotations

from collections.abc import Mapping

from fedprompt.config import FederationConfig
from fedprompt.errors import RunError, broken
from fedprompt.runs.store import BEST, RunReader, RunStore


def best_round(averages: Mapping[int, float]) -> int | None:
    """The evaluated round with the highest Average, the first of equal ones; None before the first evaluation."""
    return max(averages, key=lambda round: (averages[round], -round), default=None)


def is_over(averages: Mapping[int, float], patience: int | None) -> bool:
    """Whether the last evaluated round is `patience` rounds or more after the best one."""
    best = best_round(averages)
    return patience is not None and best is not None and max(averages) - best >= patience


class RoundChoice:
    """`federation.select` and `federation.patience` of one run. All it knows is in the run file."""

    def __init__(self, settings: FederationConfig, store: RunStore) -> None:
        self._settings, self._store = settings, store
        self._averages: dict[int, float] = {}
        if settings.select == "best" or settings.patience is not None:
            self._averages = {
                each.round: each.summary["average"] for each in store.rounds() if each.summary is not None
            }

    def committed(self, round: int, summary: Mapping[str, float] | None) -> None:
        """Called after every commit, and again when a run is resumed: the process may have been killed in between."""
        if summary is not None and (self._settings.select == "best" or self._settings.patience is not None):
            self._averages[round] = summary["average"]
        if self._settings.select == "best" and round == best_round(self._averages):
            self._store.keep_as_best()

    @property
    def is_over(self) -> bool:
        return is_over(self._averages, self._settings.patience)

    def chosen(self, last: int) -> RunReader | None:
        """The run file as it was after the round that counts; None if that is the last one."""
        best = best_round(self._averages) if self._settings.select == "best" else last
        return None if best is None or best == last else kept_round(self._store, best)


def kept_round(store: RunReader, round: int) -> RunReader:
    """The copy of a run file that was made after this round."""
    kept = RunReader(store.directory / BEST)
    state = kept.server_state()
    if state is None or state[0] != round or kept.fact("config") != store.fact("config"):
        kept.close()
        raise RunError(broken(f"run: {BEST}", f"be the copy of this run after round {round}", state and state[0]))
    return kept
