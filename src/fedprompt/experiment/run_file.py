"""The run file of an experiment: a new one, or the one that is there if it rests on the same config, data and weights."""

from __future__ import annotations

import json
import platform
import secrets
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from fedprompt import config as configuration
from fedprompt.client.factory import ExperimentFactory
from fedprompt.config import Config
from fedprompt.config.registries import REMOTE_ENGINES
from fedprompt.core.method import World
from fedprompt.data.partition import class_counts
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.sources.base import Source
from fedprompt.errors import RunError, argument, broken
from fedprompt.evaluation.label_check import check_labels, warning
from fedprompt.features.image_bank import ImageBank
from fedprompt.random_streams import EDITION
from fedprompt.runs.run import Run, require_same_ground, require_same_streams
from fedprompt.runs.store import RUN_ID, STREAMS, Event, RunStore
from fedprompt.runs.tables import FILE


def refuse_another_run(config: Config, resume: bool) -> None:
    """Raise where the run directory holds a run of another config, or any run without `resume`."""
    directory = config.run_directory
    if not (directory / FILE).exists():
        return
    run = Run(directory)
    try:
        if resume and run.reader.version not in RunStore.versions:
            raise run.reader.cannot_be_resumed()
        stored = run.reader.fact("config")
    finally:
        run.close()
    requested = config.model_dump(mode="json")
    lines = configuration.difference(
        {key: value for key, value in stored.items() if key not in configuration.NO_RESULT},
        {key: value for key, value in requested.items() if key not in configuration.NO_RESULT},
    )
    if lines:
        raise RunError(
            f"run {str(directory)!r} was made with another config (stored -> requested):\n  " + "\n  ".join(lines)
        )
    if not resume:
        again = argument("resume=True", "--resume")
        raise RunError(f"run {str(directory)!r} exists already; continue it with {again}, or give it another name=")


def open_store(
    factory: ExperimentFactory, source: Source, manifest: Manifest, frozen: str, world: World, bank: ImageBank
) -> RunStore:
    """A new run file, or the one that is there. A new one begins with a check of the labels, where class names are read."""
    if (factory.config.run_directory / FILE).exists():
        return resumed_store(factory.config, manifest, frozen)
    facts = {
        **new_facts(factory.config, manifest, frozen),
        class_counts.FACT: class_counts.packed(manifest, source.labels),
    }
    part = factory.config.federation.evaluate_on
    check = check_labels(world, bank, factory.config.seed, part) if factory.method.uses_text else None
    if check is None:
        return RunStore.create(factory.config.run_directory, facts)
    text = warning(check)
    events = [] if text is None else [Event(None, "label_check", text)]
    return RunStore.create(factory.config.run_directory, {**facts, "label_check": check}, events)


def new_facts(config: Config, manifest: Manifest, frozen: str) -> dict[str, Any]:
    """What a new run file says of itself."""
    facts = {
        "config": config.model_dump(mode="json"),
        "backbone": frozen,
        **manifest.to_facts(),
        "classes": list(manifest.class_names),
        "domains": list(manifest.domain_names),
        "versions": _versions(),
        STREAMS: EDITION,
    }
    return facts if config.engine.kind not in REMOTE_ENGINES else {**facts, RUN_ID: secrets.token_hex(16)}


def resumed_store(config: Config, manifest: Manifest, frozen: str, patience: float = 0.0) -> RunStore:
    """The run file that is there, if it rests on the same data and weights."""
    store, versions = RunStore(config.run_directory, patience=patience), _versions()
    try:
        require_same_streams(store, "resumed")
        advice = "; give the new run another name=, or delete the directory"
        require_same_ground(store, frozen, manifest, "resumed", advice)
        if (store.fact(RUN_ID) is None) != (config.engine.kind not in REMOTE_ENGINES):
            rule = "keep clients where they are: in the run file, or on nodes"
            raise RunError(broken("engine.kind", rule, config.engine.kind) + advice)
    except RunError:
        store.close()
        raise
    engine = config.engine.model_dump(mode="json", include={"cohort", "compile"})
    before = store.fact("config").get("engine", {})
    for what, stored, now in (
        ("versions", store.fact("versions"), versions),
        ("engine", {name: before.get(name) for name in engine}, engine),
    ):
        if stored != now:  # either may change the last bits
            store.note(len(store.rounds()), None, "resumed", f"with other {what}: {json.dumps(now)}")
    return store


def run_id(store: RunStore) -> str:
    """What distinguishes this run from all others, on every node."""
    return str(store.fact(RUN_ID))


@cache
def _installed() -> dict[str, str]:
    packages = ("fedprompt", "torch", "transformers", "numpy", "safetensors", "pillow")
    return {name: version(name) for name in packages}


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        **_installed(),
    }
