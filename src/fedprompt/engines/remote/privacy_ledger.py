"""The privacy cost of a site over all runs so far, on its own disk and by its own accounting.

A release is counted before it is computed, so a node that is killed in between has counted too much, never too little. Only the
latest round may be counted before and computed now: a round before it is counted, even if it was counted earlier. The sum
over runs adds the epsilon of each run at the site's own delta, and the epsilon of each noised evaluation. The noise of an update
protects all data of the site, that of an evaluation one test image. So the sum is a bound for every single image.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import StorageError
from fedprompt.io.bounded_read import read_json
from fedprompt.io.files import write_atomically
from fedprompt.privacy.accounting import Plan, epsilon

FILE = "privacy_ledger.json"
FORMAT = "fedprompt-privacy-ledger-1"
MOST_BYTES = 2**28
EXACT = 0.0  # the noise multiplier of a run whose updates have no noise


@dataclass(frozen=True)
class Spent:
    """The releases of one run."""

    noise: float = EXACT
    releases: int = 0
    """Updates and surveys."""
    last: int = -1
    """The latest round that was counted; 0 for a survey."""
    evaluations: int = 0
    last_evaluation: int = 0
    evaluation_epsilon: float = 0.0
    """The sum over all noised evaluations."""

    def epsilon(self, delta: float) -> float:
        """Without exact releases, which no epsilon covers."""
        if not self.noise or not self.releases:
            return self.evaluation_epsilon
        return epsilon(self.noise, delta, Plan("client", self.releases)) + self.evaluation_epsilon


class PrivacyLedger:
    """The releases of a site by run, in one file that is replaced atomically."""

    def __init__(self, directory: Path, policy: SitePolicy) -> None:
        self._file, self._policy = directory / FILE, policy

    def runs(self) -> dict[str, Spent]:
        if not self._file.exists():
            return {}
        try:
            values = read_json(self._file, MOST_BYTES)
            if values["format"] != FORMAT:
                raise ValueError(f"its format must be {FORMAT!r}, got {values['format']!r}")
            return {run: Spent(**spent) for run, spent in values["runs"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(f"{self._file} cannot be read: {error}") from error

    def charge_update(self, run: str, round: int, noise: float) -> str | None:
        """Count the release of a round, once; returns a reason instead if the budget has no room for it."""
        spent = self.runs().get(run, Spent(noise))
        if round == spent.last:
            return None  # counted already, by a node that was killed before it could answer
        weakest = min(spent.noise, noise) if spent.releases else noise
        return self._charged(
            run, replace(spent, noise=weakest, releases=spent.releases + 1, last=max(round, spent.last))
        )

    def charge_evaluation(self, run: str, round: int, cost: float) -> str | None:
        """The same for the figures of a round; `cost` is 0 if they are exact."""
        spent = self.runs().get(run, Spent())
        if round == spent.last_evaluation:
            return None
        total = spent.evaluation_epsilon + cost
        last = max(round, spent.last_evaluation)
        more = replace(spent, evaluations=spent.evaluations + 1, last_evaluation=last, evaluation_epsilon=total)
        return self._charged(run, more)

    def total(self) -> tuple[float, float]:
        """Epsilon and delta of all runs."""
        return self._sum(self.runs())

    def _sum(self, runs: dict[str, Spent]) -> tuple[float, float]:
        delta = self._policy.run_delta
        noised = sum(1 for spent in runs.values() if spent.noise and spent.releases)
        return sum(spent.epsilon(delta) for spent in runs.values()), noised * delta

    def _charged(self, run: str, spent: Spent) -> str | None:
        runs = {**self.runs(), run: spent}
        most = self._policy.total_epsilon
        if most is not None:
            used, delta = self._sum(runs)
            if used > most or delta > self._policy.total_delta * (1 + 1e-9):
                return f"the budget of this site over all runs must have room for this release (total_epsilon: {most:g}), got none"
        values = {"format": FORMAT, "runs": {name: asdict(each) for name, each in runs.items()}}
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self._file, json.dumps(values, indent=1).encode())
        os.chmod(self._file, 0o600)
        return None
