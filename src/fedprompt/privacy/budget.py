"""The privacy budget of a run: the noise that its config requires, and the epsilon spent so far.

The run file contains one event of kind `privacy` for every round, so that a resumed run continues the count.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fedprompt.config import Config, PrivacyConfig
from fedprompt.core.client_sampling import cohort_size, sample_cohort
from fedprompt.privacy.accounting import Plan, epsilon, noise_for
from fedprompt.runs.store import PRIVACY, Event


@dataclass(frozen=True)
class Terms:
    """The privacy of a run: its settings, and the noise multiplier that follows from them."""

    settings: PrivacyConfig
    noise: float
    expected: float
    """Clients in a cohort."""
    participants: Sequence[int]
    releases: Callable[[int], int]
    """Noised values that a client sends in one participation: 1, or its training steps."""

    @classmethod
    def of(
        cls,
        config: Config,
        participants: Sequence[int],
        surveys: int,
        steps: Callable[[int], int],
        away: Callable[[int], Collection[int]] = lambda round: (),
    ) -> Terms | None:
        """None if the run is not private. `steps` counts the training steps of a client, `away` gives the clients absent in a round."""
        if config.privacy is None:
            return None
        settings, federation = config.privacy, config.federation
        share = federation.fraction * len(participants)
        expected = share if federation.sampling == "poisson" else cohort_size(federation.fraction, len(participants))
        releases = cache(steps) if settings.noise_at == "step" else (lambda client: 1)
        terms = cls(settings, settings.noise or 0.0, expected, participants, releases)
        if settings.target_epsilon is None:
            return terms
        plan = terms.plans(config, surveys, away)[-1]
        return replace(terms, noise=noise_for(settings.target_epsilon, settings.delta, plan))

    def plans(
        self, config: Config, surveys: int, away: Callable[[int], Collection[int]] = lambda round: ()
    ) -> list[Plan]:
        """The releases of a run of this config after each of its rounds."""
        federation, sent, found = config.federation, Counter[int](), []
        for round in range(1, federation.rounds + 1):
            poisson = federation.sampling == "poisson"
            absent, clients = away(round), self.participants
            drawn = sample_cohort(config.seed, round, clients, federation.fraction, absent, poisson=poisson)
            sent.update(self.sent_by(drawn))
            found.append(self.plan(config, surveys, round, max(sent.values(), default=0)))
        return found

    def plan(self, config: Config, surveys: int, rounds: int, releases: int) -> Plan:
        """A plan of some rounds, with the largest number of releases of a client."""
        at, sampling = self.settings.noise_at, config.federation.sampling
        releases = rounds if at == "server" else releases
        return Plan(at, releases, len(self.participants), self.expected, sampling, surveys)

    def sent_by(self, cohort: Sequence[int]) -> dict[int, int]:
        """The releases of each client of a cohort. A refused client has sent as much as the others."""
        return {client: self.releases(client) for client in cohort}


class Budget:
    """Counts releases: everything that was sent, also in a round that was repeated."""

    def __init__(self, config: Config, terms: Terms, spent: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config, self._terms = config, terms
        self._rounds = self._surveys = 0
        self._releases: Counter[int] = Counter()
        self.clip = terms.settings.clip  # of the next round
        for cost in spent:
            self._count(cost)

    def survey(self) -> Event:
        """Count a survey of all clients."""
        return self._note({"surveys": 1})

    def round(self, cohorts: Sequence[Sequence[int]], next_clip: float | None) -> Event:
        """Count a round, with one cohort for every attempt."""
        attempts = len(cohorts)
        sent = {str(client): count for client, count in sorted(self._sent(cohorts).items())}
        return self._note({"rounds": attempts, "releases": sent, "clip": self.clip, "next_clip": next_clip})

    def move_clip(self, next_clip: float) -> Event:
        """Restore the bound of the next round, if its round was already counted."""
        return self._note({"next_clip": next_clip})

    def affords(self, cohorts: Sequence[Sequence[int]], surveys: int = 0) -> bool:
        """Whether these further attempts at a round (one cohort each) and surveys stay within the budget."""
        most = self._terms.settings.max_epsilon
        if most is None:
            return True
        return self._epsilon(self._rounds + len(cohorts), self._releases + self._sent(cohorts), surveys) <= most

    @property
    def epsilon(self) -> float:
        return self._epsilon(self._rounds, self._releases)

    def _sent(self, cohorts: Sequence[Sequence[int]]) -> Counter[int]:
        return sum((Counter(self._terms.sent_by(cohort)) for cohort in cohorts), Counter[int]())

    def _epsilon(self, rounds: int, releases: Counter[int], surveys: int = 0) -> float:
        most = max(releases.values(), default=0)
        plan = self._terms.plan(self._config, self._surveys + surveys, rounds, most)
        return epsilon(self._terms.noise, self._terms.settings.delta, plan)

    def _note(self, cost: dict[str, Any]) -> Event:
        self._count(cost)
        spent = self.epsilon
        spending = {"epsilon": spent if math.isfinite(spent) else None, "delta": self._terms.settings.delta}
        return Event(None, PRIVACY, json.dumps({**spending, "noise": self._terms.noise, **cost}))

    def _count(self, cost: Mapping[str, Any]) -> None:
        self._surveys += cost.get("surveys", 0)
        self._rounds += cost.get("rounds", 0)
        self._releases.update({int(client): count for client, count in cost.get("releases", {}).items()})
        if cost.get("next_clip") is not None:
            self.clip = cost["next_clip"]


def settled(config: Config, terms: Terms | None) -> Config:
    """The config with the calibrated noise, so that other processes need not calibrate it again."""
    if config.privacy is None or terms is None:
        return config
    privacy = config.privacy.model_copy(update={"noise": terms.noise, "target_epsilon": None})
    return config.model_copy(update={"privacy": privacy})
