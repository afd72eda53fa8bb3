"""Trackers: the scalars of a run in TensorBoard, MLflow, Weights & Biases, or what else is registered.

Values are read from `run.db` after the commit of their round, so they are equal to it. The last step of every tracker is kept
beside the run: a resumed run goes on behind it. A tracker that fails is left out from then on and never ends a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedprompt.config import Config
from fedprompt.config.registries import TRACKERS
from fedprompt.errors import FedpromptError
from fedprompt.federation.observer import Observer, Several
from fedprompt.io.files import write_atomically
from fedprompt.report.html_report import write_report
from fedprompt.runs.frames import client_values, round_values
from fedprompt.runs.run import Run
from fedprompt.runs.store import RoundRecord

FOLDER = "trackers"  # in a run directory: the files of its trackers

Kind = TypeVar("Kind", bound=type["Tracker"])


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker is made for."""

    name: str
    """Of the run."""
    folder: Path
    """For files of the tracker's own."""
    config: Mapping[str, Any]
    """All settings, by `section.setting`."""
    next_step: int
    """The first round that this tracker has not got."""
    id: str | None
    """What `Tracker.id` was when the run was started, if it is resumed."""


class Tracker:
    """Where the scalars of a run go. Steps are rounds; every step comes once, in order."""

    id: str | None = None
    """How the tracker finds its run again when it is resumed, if it needs that."""

    @classmethod
    def check(cls) -> None:
        """Raise a ConfigError where it cannot be used, such as without its package. Called before anything else."""

    def __init__(self, run: Tracked) -> None:
        """Begin, or go on with a resumed run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The scalars of a round: `round/average`, `client/NAME/accuracy`, ..."""

    def artifact(self, path: Path) -> None:
        """A file that belongs to the run, such as its report."""

    def close(self) -> None:
        """The run has ended, or was stopped."""


def register_tracker(name: str) -> Callable[[Kind], Kind]:
    """Register a tracker, a class like `Tracker`, under a name: `output: {trackers: [...]}` in a config."""
    return TRACKERS.registrar(name)


@contextmanager
def tracked(config: Config, observer: Observer) -> Iterator[Observer]:
    """The observer and the trackers of a config as one, for a run."""
    if not config.output.trackers:
        yield observer
        return
    tracking = Tracking(config, observer.noted)
    try:
        yield Several(observer, tracking)
    finally:
        tracking.close()


class Tracking(Observer):
    """Gives every committed round to the trackers of a config."""

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        self._config, self._tell = config, tell
        self._trackers: dict[str, Tracker] = {}
        self._steps: dict[str, int] = {}
        self._run: Run | None = None

    def started(self, config: Config, client_names: Sequence[str], rounds_done: int) -> None:
        self._run = Run(config.run_directory)
        for name in config.output.trackers:
            kept = self._kept(name)
            step = min(int(kept.get("step", -1)), rounds_done)
            folder = config.run_directory / FOLDER / name
            about = Tracked(config.run_name, folder, flat(config.model_dump(mode="json")), step + 1, kept.get("id"))
            self._steps[name] = step
            self._guarded(name, partial(self._begin, name, about))
        self._catch_up()

    def committed(self, record: RoundRecord) -> None:
        self._catch_up()

    def concluded(self, figures: Mapping[str, Any]) -> None:
        """The report at the end; its figures are those of the whole run."""
        if self._run is None or not self._trackers:
            return
        try:
            made = write_report([self._run], self._run.directory / FOLDER)
        except (FedpromptError, OSError) as error:
            self._tell(f"trackers get no report: {error}")
            return
        for name, tracker in [*self._trackers.items()]:
            self._guarded(name, partial(tracker.artifact, made.html))

    def close(self) -> None:
        """Let every tracker finish, also when the run was stopped."""
        for name, tracker in [*self._trackers.items()]:
            self._guarded(name, tracker.close)
        self._trackers.clear()
        if self._run is not None:
            self._run.close()

    def _begin(self, name: str, about: Tracked) -> None:
        about.folder.mkdir(parents=True, exist_ok=True)
        self._trackers[name] = TRACKERS.get(name)(about)

    def _catch_up(self) -> None:
        """Every committed round that a tracker does not have."""
        if self._run is None or not self._trackers:
            return
        for record in self._run.rounds():
            values: dict[str, float] = {}
            for name, tracker in [*self._trackers.items()]:
                if record.round > self._steps[name]:
                    values = values or scalars(self._run, record)
                    self._guarded(name, partial(tracker.log, record.round, values))
                    self._keep(name, record.round)

    def _keep(self, name: str, step: int) -> None:
        self._steps[name] = step
        if name in self._trackers:
            known = json.dumps({"step": step, "id": self._trackers[name].id})
            self._guarded(name, lambda: write_atomically(self._file(name), known.encode()))

    def _kept(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._file(name).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and type(found.get("step")) is int else {}

    def _file(self, name: str) -> Path:
        return self._config.run_directory / FOLDER / f"{name}.json"

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        """A tracker is the code of others, and may need a network."""
        try:
            call()
        except Exception as error:
            self._trackers.pop(name, None)
            self._tell(f"tracker {name} failed and gets nothing more of this run: {type(error).__name__}: {error}")


def scalars(run: Run, record: RoundRecord) -> dict[str, float]:
    """The numbers of one committed round, as `Run.to_pandas` has them."""
    found = {f"round/{name}": value for name, value in round_values(record).items() if name != "round"}
    for client, result in run.evaluations(record.round).items() if record.summary is not None else ():
        found |= {f"client/{run.clients[client]}/{name}": value for name, value in client_values(result).items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by `section.setting`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) and value else {before + name: value}
    return found
