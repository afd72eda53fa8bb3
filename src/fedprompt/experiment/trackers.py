"""TensorBoard, MLflow and Weights & Biases. Each package is imported only where a config names it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from fedprompt.errors import ConfigError, broken
from fedprompt.experiment.tracking import Tracked, Tracker, register_tracker

PROJECT = "fedprompt"  # under which MLflow and Weights & Biases list runs
MOST = 1000  # metrics in one message to MLflow
LONGEST = 500  # characters of a setting there


class Packaged(Tracker):
    """A tracker that needs a package."""

    package: ClassVar[str]
    install: ClassVar[str]
    """What pip calls it."""

    @classmethod
    def check(cls) -> None:
        """Raise where the package is missing; it is not imported."""
        if find_spec(cls.package) is None:
            rule = "name trackers whose package is installed"
            how = f"pip install {cls.install}, or all of them: pip install 'fedprompt[trackers]'"
            raise ConfigError(f"{broken('output.trackers', rule, cls.package)}: {how}")


@register_tracker("tensorboard")
class TensorBoard(Packaged):
    """Event files in `trackers/tensorboard` of the run directory: `tensorboard --logdir runs`."""

    package, install = "tensorboard", "tensorboard"

    def __init__(self, run: Tracked) -> None:
        kind = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = kind(str(run.folder), purge_step=run.next_step)  # a step half written before a kill is hidden
        if not run.next_step:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, new_style=True)  # single precision: the pages show no double
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@register_tracker("mlflow")
class MLflow(Packaged):
    """A run of MLflow, where MLFLOW_TRACKING_URI says; else in a file store in the run directory."""

    package, install = "mlflow", "mlflow-skinny"

    def __init__(self, run: Tracked) -> None:
        tracking = import_module("mlflow.tracking")
        self._entities = import_module("mlflow.entities")
        self._client = tracking.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or run.folder.resolve().as_uri())
        if run.id is not None:
            self.id = run.id
            return
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = self._client.create_experiment(PROJECT) if known is None else known.experiment_id
        self.id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        for name, value in run.config.items():
            self._client.log_param(self.id, name, str(value)[:LONGEST])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(plain(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MOST):
            self._client.log_batch(self.id, metrics=metrics[start : start + MOST])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self.id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self.id)


@register_tracker("wandb")
class WeightsAndBiases(Packaged):
    """A run of Weights & Biases, as its own environment variables say, such as WANDB_MODE=offline."""

    package, install = "wandb", "wandb"

    def __init__(self, run: Tracked) -> None:
        self._wandb = import_module("wandb")
        self._run = self._wandb.init(
            project=PROJECT, name=run.name, id=run.id, resume="allow", dir=str(run.folder), config=dict(run.config)
        )
        self.id = str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def artifact(self, path: Path) -> None:
        self._run.log_artifact(str(path), name="report", type="report")

    def close(self) -> None:
        self._run.finish()


def plain(name: str) -> str:
    """A name with the letters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
