"""How far a grid is, how long the rest may take, and several processes that share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from fedprompt.config import Config
from fedprompt.errors import StorageError
from fedprompt.papers.collect import Request, is_finished
from fedprompt.runs.run import Run

EVERY = 5.0  # seconds from one look at the folders to the next


@dataclass
class Progress:
    """The runs of a grid that are finished, with their seconds."""

    configs: Sequence[Config]
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the finished runs, by name."""

    def look(self) -> Progress:
        """Read what is there; a run that is known to be finished is not read again."""
        for config in self.configs:
            if config.run_name not in self.seconds and is_finished(config):
                with closing(Run(config.run_directory)) as run:
                    self.seconds[config.run_name] = sum(run.summary()["seconds"].values())
        return self

    @property
    def left(self) -> list[Config]:
        return [config for config in self.configs if config.run_name not in self.seconds]

    def by_method(self) -> dict[str, tuple[int, int, float | None]]:
        """Finished runs, all runs, and the mean seconds of a finished one, by the label of their method."""
        found: dict[str, list[float | None]] = {}
        for config in self.configs:
            found.setdefault(config.label, []).append(self.seconds.get(config.run_name))
        known = {label: [each for each in some if each is not None] for label, some in found.items()}
        return {label: (len(known[label]), len(some), _mean(known[label])) for label, some in found.items()}

    def seconds_left(self, jobs: int = 1) -> float | None:
        """By the mean of the finished runs of the same method, or of all; None while none is finished."""
        everyone = _mean(list(self.seconds.values()))
        if everyone is None:
            return None if self.left else 0.0
        means = {label: mean for label, (_, _, mean) in self.by_method().items()}
        needed = sum(everyone if (mean := means[config.label]) is None else mean for config in self.left)
        return needed / max(1, min(jobs, len(self.left)))

    def sentence(self, jobs: int = 1) -> str:
        """`12 of 40 runs finished, about 1:20:00 left`."""
        left = self.seconds_left(jobs)
        about = "time left unknown" if left is None else f"about {clock(left)} left"
        return f"{len(self.seconds)} of {len(self.configs)} runs finished, {about}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def clock(seconds: float) -> str:
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d}:{int(seconds % 60):02d}"


def run_together(request: Request, jobs: int, say: Callable[[str], None]) -> None:
    """Several processes of one thread each run what is left; all end with this one. What fails is left unfinished."""
    progress = Progress(request.configs()).look()
    jobs = min(jobs, len(progress.left))
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedprompt.papers.grid_worker", json.dumps(request.to_json())]
    workers = [
        subprocess.Popen([*command, str(place), str(jobs)], stdin=subprocess.PIPE, env=environment)
        for place in range(jobs)
    ]
    said = ""
    try:
        while any(worker.poll() is None for worker in workers):
            text = progress.look().sentence(jobs)
            if text != said:
                say(text)
                said = text
            until = time.monotonic() + EVERY
            while time.monotonic() < until and any(worker.poll() is None for worker in workers):
                time.sleep(0.1)
    finally:
        for worker in workers:
            if worker.stdin is not None:
                worker.stdin.close()  # ends it, if it is still there
            worker.wait()
    if any(worker.returncode == StorageError.exit_code for worker in workers):
        raise StorageError("a process of the grid could not write its run; the same command goes on")
