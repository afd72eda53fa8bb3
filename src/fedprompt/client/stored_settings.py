"""The settings of a run that is opened to be used. A run file may come from anybody, so its settings decide on no place of this machine.

What it says of methods, seeds and sizes counts. Backbones and images that have a name are used. A path or a hub id in it is used only
by those who say that they trust it, and the same holds for its cache and memory limits.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedprompt.backbones.catalog import NAMED
from fedprompt.config import Config, DataConfig, EngineConfig, OutputConfig
from fedprompt.data.sources.open import NAMED as NAMED_SOURCES
from fedprompt.errors import ConfigError, argument


def settings_here(
    config: Config,
    trust: bool,
    weights: str | Path | None = None,
    data: str | Path | None = None,
    device: str | None = None,
) -> Config:
    """The settings of a run on this machine, with the places that were given. A compiled backbone takes long, and rounds otherwise."""
    given = {"name": None if weights is None else str(weights), "device": device}
    engine, output = config.engine.model_copy(update={"compile": False}), config.output
    source = config.data.model_copy(update={"other_set": None})  # only the run itself is tested on it
    if not trust:
        own = EngineConfig()
        room = {"memory_gib": own.memory_gib, "disk_gib": own.disk_gib, "workers": own.workers}
        engine, output = engine.model_copy(update=room), OutputConfig(threads=_threads(config.output.threads))
    if data is not None:
        source = DataConfig(**{**source.model_dump(), "source": str(data), "format": "auto"})
    backbone = config.backbone.model_copy(update={key: value for key, value in given.items() if value is not None})
    return config.model_copy(update={"backbone": backbone, "data": source, "engine": engine, "output": output})


def require_weights(config: Config, run: Path, trust: bool, weights: str | Path | None) -> None:
    """Raise where the backbone of a run lies at a place that only the run file names."""
    if not trust and weights is None and config.backbone.name not in NAMED:
        raise _untrusted("backbone.name", run, config.backbone.name, "weights")


def require_images(config: Config, run: Path, trust: bool, data: str | Path | None) -> None:
    """The same for its images."""
    kind = config.data.source if config.data.format == "auto" else config.data.format
    if not trust and data is None and kind not in NAMED_SOURCES:
        raise _untrusted("data.source", run, config.data.source, "data")


def require_partition(config: Config, run: Path, trust: bool) -> None:
    """The same for the file of a partition that was given by one."""
    if not trust and config.partition.manifest is not None:
        raise _untrusted("partition.manifest", run, config.partition.manifest)


def _untrusted(field: str, run: Path, value: str, option: str | None = None) -> ConfigError:
    place = argument(f"{option}=", f"--{option}")
    otherwise = f", or say yourself where they are with {place}" if option else ""
    trust = argument("trust_config=True", "--trust-config")
    return ConfigError(
        f"{field} of run {str(run)!r} must be trusted to be used, got {value!r}, which is what the run file says: add "
        f"{trust} if the run is your own{otherwise}"
    )


def _threads(asked: int | None) -> int | None:
    """As many as in the run, or as this machine has."""
    return asked if asked is not None and asked <= (os.cpu_count() or 1) else None
