"""A study on Optuna: trials that are proposed, trained, compared on validation images and stored.

One SQLite file holds all studies, and each study is an Optuna study for every stage of successive halving: in the first one
the sampler (TPE) proposes values, in the others the best trials of the stage before go on. The rounds of every trial are in
its own run file, so a trial that goes on repeats nothing. After `kill -9` a trial that was running is put into the queue
again and goes on after its last committed round. With one process a study that was stopped comes out as one that was not: what
the sampler draws depends on the seed and on the trials before.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fedprompt.core.search_space import FloatRange
from fedprompt.errors import ConfigError, DivergenceError, QuorumError, StorageError
from fedprompt.experiment.experiment import Experiment
from fedprompt.federation.observer import Observer
from fedprompt.runs.run import Run
from fedprompt.runs.store import RoundRecord
from fedprompt.tuning.plan import Plan
from fedprompt.tuning.space import start_of

try:
    import optuna
except ImportError as error:  # an extra
    raise ConfigError("fedprompt tune needs Optuna: pip install 'fedprompt[tune]'") from error

STUDIES = "studies.db"
LOCK = "studies.lock"
FOLDER, DIVERGED = "folder", "diverged"  # what is noted of a trial
OWN = "trial-0000"  # has the values of the config, also those outside what is searched: these it does not name
OBJECTIVE = "Average accuracy on validation images"
DONE = (optuna.trial.TrialState.COMPLETE,)
RUNNING = (optuna.trial.TrialState.RUNNING,)
KEPT = (*DONE, *RUNNING, optuna.trial.TrialState.WAITING)
FIRST_DRAWS = 0.25  # share of the trials that are drawn at random before the sampler learns from them

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Paused(Exception):
    """Ends the part of a trial that belongs to a stage."""


def open_stage(plan: Plan, stage: int) -> optuna.Study:
    """One stage of a study. The first one begins with the values of the config, a later one with the best of the one before."""
    path = plan.directory.parent / STUDIES
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 120}})
        study = optuna.create_study(
            storage=storage,
            study_name=f"{plan.study}/stage-{stage}",
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.NopPruner(),
        )
    except (OSError, optuna.exceptions.StorageInternalError) as error:
        raise StorageError(f"output.directory must be writable and have room, got {str(path)!r}: {error}") from error
    return study


def fill(plan: Plan, stage: int) -> None:
    """Put the trials into the queue that a stage begins with, and those that were running when their process ended."""
    study = open_stage(plan, stage)
    for trial in study.get_trials(deepcopy=False, states=RUNNING):
        study.enqueue_trial(dict(trial.params), user_attrs={FOLDER: trial.user_attrs[FOLDER]})
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    there = {trial.user_attrs[FOLDER] for trial in study.get_trials(deepcopy=False, states=KEPT)}
    if stage:
        queue = [
            (trial.params, trial.user_attrs[FOLDER]) for trial in _promoted(ranked(plan, stage - 1), plan.counts[stage])
        ]
    else:
        queue = [(start_of(plan.config, plan.space), OWN)]
    for values, folder in queue:
        if folder not in there:
            study.enqueue_trial(dict(values), user_attrs={FOLDER: folder})


def _promoted(best_first: list[Any], count: int) -> list[Any]:
    """The best trials. The config's own values are among them where there is room for more than one: readers compare with it."""
    chosen = best_first[:count]
    own = [trial for trial in best_first if trial.user_attrs[FOLDER] == OWN]
    return [*chosen[:-1], *own] if own and count > 1 and own[0] not in chosen else chosen


def ranked(plan: Plan, stage: int) -> list[Any]:
    """The trials of a stage that did not diverge, the best first."""
    done = open_stage(plan, stage).get_trials(deepcopy=False, states=DONE)
    sound = [trial for trial in done if DIVERGED not in trial.user_attrs]
    return sorted(sound, key=lambda trial: (-trial.value, trial.user_attrs[FOLDER]))


def work(plan: Plan, stage: int, threads: int | None = None, say: Callable[[str], None] = lambda text: None) -> None:
    """Run the trials of a stage. Several processes may do this at once."""
    study = open_stage(plan, stage)
    while (trial := _next_trial(plan, study, stage)) is not None:
        _run_trial(plan, study, stage, trial, threads, say)


def _next_trial(plan: Plan, study: optuna.Study, stage: int) -> optuna.Trial | None:
    with _alone(plan):
        known = len(study.get_trials(deepcopy=False, states=(*DONE, *RUNNING)))
        waiting = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
        if not waiting and (stage or known >= plan.trials):
            return None
        digest = hashlib.sha256(f"{plan.seed}:{known}".encode()).digest()
        startup = max(1, round(FIRST_DRAWS * plan.trials))
        study.sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4]), n_startup_trials=startup)
        trial = study.ask()
        if FOLDER not in trial.user_attrs:
            trial.set_user_attr(FOLDER, f"trial-{known:04d}")
        values = plan.space if trial.user_attrs.get(FOLDER) != OWN else start_of(plan.config, plan.space)
        for setting in values:
            each = plan.space[setting]
            if isinstance(each, FloatRange):
                trial.suggest_float(setting, each.low, each.high, log=each.log)
            else:
                trial.suggest_categorical(setting, each.values)
        return trial


def _run_trial(
    plan: Plan, study: optuna.Study, stage: int, trial: optuna.Trial, threads: int | None, say: Callable[[str], None]
) -> None:
    folder, stop, begin = trial.user_attrs[FOLDER], plan.stops[stage], time.monotonic()
    config = plan.trial(trial.params, folder, threads)
    value = 0.0
    try:
        with suppress(Paused):
            Experiment(config).run(resume=True, observer=Pause(stop, plan.rounds), test=False).close()
        run = Run(config.run_directory)
        value = objective(run, stop)
        run.close()
        outcome = f"{100 * value:.2f} %"
    except (DivergenceError, QuorumError) as error:
        trial.set_user_attr(DIVERGED, str(error).splitlines()[0])
        outcome = "diverged"
    with _alone(plan):
        study.tell(trial, value)
    chosen = ", ".join(f"{setting} {_short(number)}" for setting, number in trial.params.items())
    done, seconds = len(study.get_trials(deepcopy=False, states=DONE)), time.monotonic() - begin
    head = f"{plan.study}: round {stop}, trial {done} of {plan.counts[stage]}"
    say(f"{head}: {outcome} ({folder}, {seconds:.1f} s: {chosen})")


class Pause(Observer):
    """Ends a run after the last round of a stage; the last stage ends by itself."""

    def __init__(self, stop: int, rounds: int) -> None:
        self._stop = stop if stop < rounds else None

    def started(self, config: Any, client_names: Any, rounds_done: int) -> None:
        if self._stop is not None and rounds_done >= self._stop:  # it was stopped after its last commit
            raise Paused

    def committed(self, record: RoundRecord) -> None:
        if record.round == self._stop:
            raise Paused


def objective(run: Run, stop: int) -> float:
    """The figure that is compared after a round: at the end the one that tables would show, before it that of the round.

    Where the config chooses the best round, it is the best one so far.
    """
    summary, history = run.summary(), run.history()
    assert summary["images"] == "validation"
    if run.config.federation.select == "best":
        return float(summary["best_average"])
    return float(summary["average"] if stop >= run.config.federation.rounds else history[-1]["average"])


@contextmanager
def _alone(plan: Plan) -> Iterator[None]:
    """No other process of the studies reads or writes meanwhile."""
    from filelock import FileLock

    with FileLock(plan.directory.parent / LOCK):
        yield


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
