"""`fedprompt tune`: one study for every config, each with the same number of trials and of rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedprompt.config import Config
from fedprompt.config.config_files import file_name
from fedprompt.config.registries import REMOTE_ENGINES
from fedprompt.core import registry
from fedprompt.core.method import World
from fedprompt.errors import ConfigError, RunError, broken, named
from fedprompt.experiment.experiment import Experiment
from fedprompt.runs.lock import disk, locked
from fedprompt.tuning import study
from fedprompt.tuning.outcome import Outcome, conclude_study, prepared
from fedprompt.tuning.plan import PLAN, Plan
from fedprompt.tuning.space import has_setting, search_space, with_plain_rates
from fedprompt.tuning.study_page import write_page

MOST_TRIALS = 100_000
MOST_JOBS = 256
CODES = {error.exit_code: error for name in dir(sys.modules["fedprompt.errors"]) if (error := named(name)) is not None}


def tune(
    configs: Sequence[Config],
    section: Mapping[str, Any],
    directory: Path,
    trials: int,
    jobs: int = 1,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Outcome], Path]:
    """Search the settings of each config on validation images; the outcomes, and the page that shows them.

    `section` is the section `tune` of the config file. Studies are in `directory`. With `resume`, those that are there go on.
    """
    for field, value, most in (("--trials", trials, MOST_TRIALS), ("--jobs", jobs, MOST_JOBS)):
        if not 1 <= value <= most:
            raise ConfigError(broken(field, f"be in 1..{most}", value))
    full = [Experiment(_checked(config)).config for config in configs]
    worlds = [prepared(config) for config in full]
    plans = [
        _planned(config, world, section, directory, trials) for config, (world, _) in zip(full, worlds, strict=True)
    ]
    _check_section(section, full, [world for world, _ in worlds])
    for plan in plans:
        if (plan.directory / PLAN).exists():
            if not resume:
                raise RunError(
                    f"study {str(plan.directory)!r} exists already; continue it with --resume, or give name="
                )
            plan.require_same(Plan.load(plan.directory))
    with disk(directory):
        directory.mkdir(parents=True, exist_ok=True)
    lock = locked(directory)
    try:
        for plan in plans:
            with disk(directory):
                plan.directory.mkdir(exist_ok=True)
            plan.save()
            for stage, count in enumerate(plan.counts):
                study.fill(plan, stage)
                if jobs == 1:
                    study.work(plan, stage, say=say)
                else:
                    _work_together(plan, stage, min(jobs, count))
        outcomes = [conclude_study(plan, world, data) for plan, (world, data) in zip(plans, worlds, strict=True)]
        return outcomes, write_page(outcomes, directory)
    finally:
        lock.release()


def studies_directory(config: Config) -> Path:
    """Where the studies of a config file are."""
    return Path(config.output.directory) / f"tune-{config.name}"


def _checked(config: Config) -> Config:
    if config.engine.kind in REMOTE_ENGINES:
        rule = "be in-process to tune: clients elsewhere have no validation images"
        raise ConfigError(broken("engine.kind", rule, config.engine.kind))
    return config.model_copy(update={"tuned": None})


def _planned(config: Config, world: World, section: Mapping[str, Any], directory: Path, trials: int) -> Plan:
    method = registry.build(config.method, config.variant)
    config = with_plain_rates(config, method, world)
    space = search_space(config, method, world, section)
    if not space:
        rule = "have something to tune: a learning rate, a search space of its own, or an entry in tune:"
        raise ConfigError(broken("method", rule, config.label))
    name = file_name(config.name, config.label, f"seed{config.seed}")
    return Plan(name, directory / name, config, space, trials)


def _check_section(section: Mapping[str, Any], configs: Sequence[Config], worlds: Sequence[World]) -> None:
    """Raise for an entry that no config has: it is probably misspelt."""
    methods = [registry.build(config.method, config.variant) for config in configs]
    for setting, value in section.items():
        every = zip(configs, methods, worlds, strict=True)
        if value is not None and not any(has_setting(*each, setting) for each in every):
            who = ", ".join(dict.fromkeys(config.label for config in configs))
            raise ConfigError(broken(f"tune.{setting}", f"be a setting or a trained tensor of {who}", setting))


def _work_together(plan: Plan, stage: int, jobs: int) -> None:
    """Several processes share the trials; all end with this one."""
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedprompt.tuning.trial_worker", str(plan.directory), str(stage)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(jobs)]
    try:
        codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            if worker.stdin is not None:
                worker.stdin.close()  # ends it, if it is still there
            worker.wait()
    for code in codes:
        if code:
            raise CODES.get(code, RunError)(f"study {plan.study!r}: a process of its trials ended with code {code}")
