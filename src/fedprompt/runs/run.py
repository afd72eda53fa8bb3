"""A stored run: its settings and its results. Reads `run.db` only, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedprompt
from fedprompt import config as configuration
from fedprompt.config import Config
from fedprompt.data.partition import client_names
from fedprompt.errors import ConfigError, DataError, RunError
from fedprompt.metrics.accuracy import is_result, is_summary
from fedprompt.runs import attendance
from fedprompt.runs.final_figures import FinalTest, final_figures, stored_results, stored_test
from fedprompt.runs.store import PRIVACY, STREAMS, WARNING, RoundRecord, RunReader

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedprompt.data.partition.manifest import Manifest
    from fedprompt.inference.trained_client import TrainedClient
    from fedprompt.runs.frames import Frames


# settings that a method got later, with the value under which it does what it did before: run files hold all settings
LATER: dict[str, dict[str, object]] = {
    **{name: {"parametrisation": "literal"} for name in ("pfedbayespt", "pfedbayespt_g", "pfedbayespt_d")},
    "fedmaple": {"vision_start": "random"},
    "pep_fedpt": {"softness": 1.0},
}


def as_it_was(config: Any) -> Any:
    """The stored config of a run, also of one that was made before its method had all of today's settings."""
    method = config.get("method") if isinstance(config, dict) else None
    if not isinstance(method, dict) or str(method.get("name")) not in LATER:
        return config
    return {**config, "method": {**LATER[str(method["name"])], **method}}


class Run:
    """Read access to one run directory. Other rooms are imported where a person asks for what they make of a run."""

    _final_test: FinalTest | None = None

    def __init__(self, directory: str | Path) -> None:
        self.reader = RunReader(directory)
        self.directory = self.reader.directory

    @cached_property
    def config(self) -> Config:
        try:
            return configuration.parse(as_it_was(self._fact("config")), check_names=False)
        except ConfigError as error:
            raise RunError(f"run: {str(self.directory)!r} has a config that cannot be read: {error}") from error

    @property
    def name(self) -> str:
        return self.directory.name

    @cached_property
    def clients(self) -> Sequence[str]:
        """Names of all clients; a client's number is its place here."""
        try:
            return client_names.from_fact(self._fact("clients"))
        except ValueError as error:
            raise self._damaged("fact 'clients'") from error

    def client(self, name: str | int, **options: Any) -> TrainedClient:
        """The model of one client, by its name or number, to predict with; for the options see `TrainedClient.open`."""
        return fedprompt.TrainedClient.open(self, name, **options)

    def to_pandas(self) -> Frames:
        """Data frames: `rounds`, `clients` (one row for each client and evaluated round) and `events`. Needs pandas."""
        from fedprompt.runs.frames import frames

        return frames(self)

    def metrics(self, specificity: float = 0.9, **options: Any) -> DataFrame:
        """Balanced accuracy, macro-F1, AUROC (one class against the rest) and sensitivity at a specificity: a data frame with
        a row for each client, each domain, and all together.

        Predicts the test images again, so it needs them; for the options see `TrainedClient.open`.
        """
        return import_module("fedprompt.inference.run_metrics").run_metrics(self, specificity, **options)

    def plot(self) -> Figure:
        """Average and Worst Local by round. A notebook shows the picture; `savefig` writes it to a file."""
        return fedprompt.plot([self])

    def _repr_html_(self) -> str:
        """What a notebook shows: the figures as a table, and the curve."""
        return str(import_module("fedprompt.report.in_notebook").run_html(self))

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def manifest(self) -> Manifest:
        """The images of every client, to inspect or to use in another run."""
        from fedprompt.data.partition.manifest import Manifest  # imports numpy only if needed

        try:
            return Manifest.from_facts(self.reader.fact)
        except DataError as error:
            raise self._damaged("manifest") from error

    def rounds(self) -> list[RoundRecord]:
        """Finished rounds; round 0 is the state before any training."""
        return self.reader.rounds()

    @property
    def finished(self) -> bool:
        if self.config.federation.evaluate_on == "validation":
            return self.final_test is not None
        records = self.rounds()
        return bool(records) and records[-1].round >= self.config.federation.rounds

    @property
    def final_test(self) -> FinalTest | None:
        """The test after the last round of a run that is evaluated on validation images; None if there was none so far."""
        if self._final_test is None and self.config.federation.evaluate_on == "validation":
            self._final_test = stored_test(self.reader)
            if self._final_test is not None and not is_summary(self._final_test.summary):
                raise self._damaged("summary of the final test")
        return self._final_test

    def final_results(self) -> dict[int, dict[str, Any]]:
        """The counts of every client in the final test, by client number."""
        return self._checked_results(stored_results(self.reader), "the final test")

    def history(self) -> list[dict[str, Any]]:
        """The metrics of every evaluated round."""
        found = [{"round": record.round, **record.summary} for record in self.rounds() if record.summary is not None]
        for entry in found:
            if not is_summary(entry):
                raise self._damaged(f"summary of round {entry['round']}")
        return found

    def evaluations(self, round: int) -> dict[int, dict[str, Any]]:
        """The counts of every client in one round, by client number."""
        return self._checked_results(self.reader.evaluations(round), f"round {round}")

    def _checked_results(self, found: Mapping[int, dict[str, Any]], where: str) -> dict[int, dict[str, Any]]:
        clients = len(self.clients)
        for client, result in found.items():
            if not 0 <= client < clients or not is_result(result):
                raise self._damaged(f"result of client {client} in {where}")
        return dict(found)

    def summary(self) -> dict[str, Any]:
        """The figures for tables: means over the last evaluated rounds, the best round, bytes and seconds.

        Where rounds are evaluated on validation images, these figures are those of the final test, if there was one;
        `images` says which images they are of.
        """
        records = self.rounds()
        seconds: dict[str, float] = {}
        for record in records:
            for phase, spent in record.seconds.items():
                if not isinstance(spent, int | float):
                    raise self._damaged(f"seconds of round {record.round}")
                seconds[phase] = seconds.get(phase, 0.0) + spent
        settings, covered = self.config, self.coverage()
        return {
            "run": self.name,
            "method": settings.label,
            "seed": settings.seed,
            "family": settings.family(),
            "rounds": records[-1].round if records else 0,
            "of": settings.federation.rounds,
            **self._figures(),
            "bytes_down": sum(record.bytes_down for record in records),
            "bytes_up": sum(record.bytes_up for record in records),
            "refused": self.refused(),
            "absent": self.absent(),
            **({"tested": covered.tested, "to_test": covered.of} if covered else {}),
            "epsilon": self.epsilon(),
            "seconds": seconds,
        }

    def _figures(self) -> dict[str, Any]:
        return final_figures(self.config.federation, self.history(), self.final_test)

    def refused(self) -> dict[str, int]:
        """Number of updates that the guard refused, by rule."""
        return attendance.refusals(self.reader)

    def absent(self) -> int:
        """How often a client that was picked sent no update, or none in time."""
        return attendance.absences(self.reader)

    def coverage(self) -> attendance.Coverage | None:
        """How many clients the figures of `summary` are of, where some could not be tested; else None."""
        evaluated = [record.round for record in self.rounds() if record.summary is not None]
        return attendance.coverage(self.reader, evaluated[-self.config.federation.last_rounds :])

    def warnings(self) -> list[str]:
        """Signs that training did not work, each with the setting to change."""
        found = [(round, detail) for round, _, kind, detail in self.reader.events() if kind == WARNING]
        return [f"round {round}: {detail.partition(': ')[2]}" for round, detail in found]

    def epsilon(self) -> float | None:
        """The privacy spent until the last round; None if the run is not private, infinite without noise."""
        costs = self.reader.details(PRIVACY)
        if not costs:
            return None
        spent = costs[-1].get("epsilon")
        return float(spent) if isinstance(spent, int | float) else math.inf

    def client_accuracies(self, round: int | None = None) -> dict[str, float]:
        """Accuracy by client name, of one evaluated round. When not given: the final test, or else the last round."""
        if round is None and self.final_test is not None:
            found = self.final_results()
        else:
            evaluated = [record.round for record in self.rounds() if record.summary is not None]
            found = self.evaluations(round if round is not None else evaluated[-1] if evaluated else 0)
        return {self.clients[client]: result["correct"] / result["samples"] for client, result in found.items()}

    def _fact(self, key: str) -> Any:
        value = self.reader.fact(key)
        if value is None:
            raise self._damaged(f"fact {key!r}")
        return value

    def _damaged(self, what: str) -> RunError:
        return RunError(f"run: {str(self.directory)!r} is damaged: the {what} is missing or not as it was written")

    def close(self) -> None:
        self.reader.close()


def load_run(directory: str | Path) -> Run:
    """A stored run, by its directory or its `run.db`."""
    return Run(directory)


def require_same_ground(stored: RunReader, frozen: str, manifest: Manifest, verb: str, advice: str = "") -> None:
    """Raise unless a run was started with this backbone (by its digest) and this partition."""
    from fedprompt.data.partition.manifest import stored_checksum

    same = {
        "weights of the backbone": stored.fact("backbone") == frozen,
        "partition of the data": stored_checksum(stored.fact) == manifest.checksum,
    }
    for what, holds in same.items():
        if not holds:
            raise RunError(
                f"run {str(stored.directory)!r} cannot be {verb}: the {what} are not those it was started with{advice}"
            )


def require_same_streams(stored: RunReader, verb: str) -> None:
    """Raise if a run used another edition of the random streams: its starts, cohorts and shuffles cannot be repeated."""
    from fedprompt.random_streams import EDITION  # imports torch

    found = stored.fact(STREAMS) or 1
    if found != EDITION:
        raise RunError(
            f"run {str(stored.directory)!r} cannot be {verb}: its random streams must be of edition {EDITION}, got {found}; "
            "train it again under another name=, or use the fedprompt that made it (tables and reports still read it)"
        )
