"""What came out of a study and what it cost, and the config with the best values."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import fedprompt
from fedprompt.client.factory import ExperimentFactory
from fedprompt.config import Config, TunedConfig
from fedprompt.core import registry
from fedprompt.core.method import Stage, World
from fedprompt.errors import RunError
from fedprompt.io.files import write_atomically
from fedprompt.runs.run import Run
from fedprompt.runs.tables import FILE
from fedprompt.tuning.plan import Plan
from fedprompt.tuning.space import applied
from fedprompt.tuning.study import DIVERGED, DONE, FOLDER, OBJECTIVE, open_stage


@dataclass(frozen=True)
class TrialRow:
    """One trial."""

    number: int
    values: dict[str, Any]
    figures: tuple[float, ...]
    """Its figure after every stage it was in."""
    whole: bool
    """Whether it trained until the last round."""
    diverged: bool
    rounds: int

    @property
    def first(self) -> float:
        """Its figure after the first stage, which all trials are in."""
        return self.figures[0]

    @property
    def objective(self) -> float | None:
        """Its figure after the last round; None if it ended before."""
        return self.figures[-1] if self.whole else None


@dataclass(frozen=True)
class Outcome:
    """A finished study."""

    plan: Plan
    rows: list[TrialRow]
    best: TrialRow
    tuned: TunedConfig
    path: Path
    """The config with the best values."""

    @property
    def start(self) -> TrialRow:
        """The first trial: the values of the config."""
        return self.rows[0]


def conclude_study(plan: Plan, world: World, fingerprint: str) -> Outcome:
    """Count what the study cost, choose the best trial and write its config."""
    rows, seconds, passes = _trials(plan, world)
    whole = [row for row in rows if row.whole]
    if not whole:
        raise RunError(f"study {plan.study!r} must have a trial that does not diverge, got none of {len(rows)}")
    best = max(whole, key=lambda row: (row.objective or 0.0, -row.number))
    tuned = TunedConfig(
        study=plan.study,
        trials=len(rows),
        pruned=sum(not row.whole and not row.diverged for row in rows),
        diverged=sum(row.diverged for row in rows),
        rounds=sum(row.rounds for row in rows),
        seconds=round(seconds, 3),
        image_passes=passes,
        seed=plan.seed,
        objective=OBJECTIVE,
        value=float(best.objective or 0.0),
        validation=float(plan.validation),
        data=fingerprint,
        fedprompt=fedprompt.__version__,
        chosen=best.values,
    )
    path = plan.directory.parent / f"{plan.study}.yaml"
    write_atomically(path, best_config(plan, tuned).encode())
    return Outcome(plan, rows, best, tuned, path)


def _trials(plan: Plan, world: World) -> tuple[list[TrialRow], float, int]:
    """All trials, and the seconds and passes of training images that they took together."""
    found: dict[str, TrialRow] = {}
    seconds, passes = 0.0, 0
    for stage in range(len(plan.stops)):
        for trial in open_stage(plan, stage).get_trials(deepcopy=False, states=DONE):
            folder, diverged = trial.user_attrs[FOLDER], DIVERGED in trial.user_attrs
            before = found[folder].figures if folder in found else ()
            spent, images, rounds = _cost(plan.trial(trial.params, folder, None), world)
            if folder not in found:
                seconds, passes = seconds + spent, passes + images
            number, ended = int(folder.rpartition("-")[2]), stage == len(plan.stops) - 1 and not diverged
            found[folder] = TrialRow(
                number, dict(trial.params), (*before, float(trial.value or 0.0)), ended, diverged, rounds
            )
    return sorted(found.values(), key=lambda row: row.number), seconds, passes


def _cost(config: Config, world: World) -> tuple[float, int, int]:
    """Seconds, passes of training images, and rounds of one trial."""
    if not (config.run_directory / FILE).exists():
        return 0.0, 0, 0
    stages = registry.build(config.method, config.variant).stages(world, config.train)
    run = Run(config.run_directory)
    try:
        records, sizes = run.rounds(), run.manifest().clients.train.sizes
        images = sum(
            passes(stage, int(sizes[client]), config.train.batch_size)
            for record in records
            for client in record.cohort
            for stage in stages
        )
        seconds = sum(sum(record.seconds.values()) for record in records)
        return seconds, images, records[-1].round if records else 0
    finally:
        run.close()


def passes(stage: Stage, images: int, batch: int) -> int:
    """How many images a client trains on in a stage, each as often as it comes."""
    start, end = stage.share
    whole = max(1, round((end - start) * images)) * stage.epochs
    return whole if stage.steps is None else min(whole, stage.steps * batch)


def best_config(plan: Plan, tuned: TunedConfig) -> str:
    """The config with the best values, to be run: what it is, as a comment and as the section `tuned`."""
    config = registry.completed(applied(plan.config, tuned.chosen))
    config = config.model_copy(update={"name": f"{plan.config.name}-tuned", "tuned": tuned})
    text = (
        f"Tuned by `fedprompt tune`: the best of {tuned.trials} trials of study {tuned.study} ({tuned.pruned} ended early, "
        f"{tuned.diverged} diverged), by {tuned.objective}: {100 * tuned.value:.2f} %. The trials took {tuned.rounds} rounds, "
        f"{tuned.image_passes} passes of training images and {tuned.seconds:.0f} s. Seed {tuned.seed}, fedprompt "
        f"{tuned.fedprompt}, images {tuned.data[:16]}. No test image was read."
    )
    comment = "\n".join(textwrap.wrap(text, 116, initial_indent="# ", subsequent_indent="# "))
    values = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return f"{comment}\n{values}"


def prepared(config: Config) -> tuple[World, str]:
    """The world of a config and the fingerprint of its images."""
    source, _, _, world = ExperimentFactory(config).prepare()
    return world, source.fingerprint
