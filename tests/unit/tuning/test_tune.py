"""A study from beginning to end: equal trials, validation images only, stopped and resumed, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import yaml

from fedprompt.client.factory import ExperimentFactory
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import config_files, parse
from fedprompt.errors import ConfigError, RunError
from fedprompt.experiment import Experiment
from fedprompt.report.comparison_table import comparison, notes
from fedprompt.tuning import study
from fedprompt.tuning.halving import planned_rounds
from fedprompt.tuning.outcome import Outcome
from fedprompt.tuning.run_studies import tune

Make = Callable[..., dict[str, Any]]
TRIALS, ROUNDS = 5, 3


def config(settings: Make, method: str = "fedvpt", **changes: Any) -> dict[str, Any]:
    return settings(
        data={"train_per_cell": 6},
        method={"name": method},
        backbone={"name": "tiny-clip" if method == "promptfl" else "tiny"},
        federation={"rounds": ROUNDS, "evaluate_last": 1},
        **changes,
    )


def tuned(
    values: list[dict[str, Any]], directory: Path, section: dict[str, Any] | None = None, **options: Any
) -> list[Outcome]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    return tune([parse(each) for each in values], section or {}, directory, options.pop("trials", TRIALS), **options)[0]


def figures(outcome: Outcome) -> list[tuple[dict[str, Any], tuple[float, ...]]]:
    return [(row.values, row.figures) for row in outcome.rows]


def test_two_methods_get_the_same_trials_rounds_and_image_passes(settings: Make, tmp_path: Path) -> None:
    outcomes = tuned([config(settings, "fedvpt"), config(settings, "head_tune")], tmp_path / "tune")
    for each in outcomes:
        assert each.tuned.trials == TRIALS
        assert each.tuned.rounds == planned_rounds(TRIALS, ROUNDS) == TRIALS * 1 + 2 * 2
        assert sum(row.whole for row in each.rows) == 2
        assert each.tuned.pruned == TRIALS - 2
        assert each.tuned.value == max(row.objective for row in each.rows if row.objective is not None)
    assert outcomes[0].tuned.image_passes == outcomes[1].tuned.image_passes > 0


@pytest.mark.slow
def test_image_passes_are_the_training_images_of_every_round(settings: Make, tmp_path: Path) -> None:
    (outcome,) = tuned([config(settings, train={"epochs": 2})], tmp_path / "tune", trials=1)
    factory = ExperimentFactory(outcome.plan.trial({}, "x", None))
    images = int(factory.prepare().manifest.clients.train.sizes.sum())
    assert outcome.tuned.image_passes == ROUNDS * 2 * images


def test_the_first_trial_has_the_values_of_the_config_and_is_seen_to_the_end(settings: Make, tmp_path: Path) -> None:
    (outcome,) = tuned([config(settings, train={"lr": 0.05})], tmp_path / "tune")
    assert outcome.start.values == {"train.lrs.prompt": 0.05, "train.lrs.head.*": 0.05}
    assert outcome.start.whole
    trial = outcome.plan.trial(outcome.start.values, "again", None)
    again = Experiment(trial.model_copy(update={"name": "again"})).run(test=False)
    assert again.history()[-1]["average"] == outcome.start.objective


def test_the_first_trial_also_has_values_of_the_config_that_are_not_in_the_ranges(
    settings: Make, tmp_path: Path
) -> None:
    section = {"train.lrs.prompt": {"low": 0.1, "high": 1.0}}
    (outcome,) = tuned([config(settings, train={"lr": 0.05})], tmp_path / "tune", section, trials=2)
    assert outcome.start.values == {"train.lrs.head.*": 0.05}
    trial = outcome.plan.trial(outcome.start.values, "again", None)
    assert trial.train.lr == 0.05
    assert "prompt" not in trial.train.lrs
    assert set(outcome.rows[1].values) == {"train.lrs.prompt", "train.lrs.head.*"}
    assert outcome.start.figures
    assert "NaN" not in (tmp_path / "tune/tuning.html").read_text()


def test_an_adaptive_setting_is_that_of_the_config_in_the_first_trial(settings: Make, tmp_path: Path) -> None:
    """The temperature of PEP-FedPT comes from the data: no number of the range is the same."""
    (outcome,) = tuned([config(settings, "pep_fedpt")], tmp_path / "tune", trials=1)
    assert "method.temperature" in outcome.plan.space
    assert "method.temperature" not in outcome.start.values
    assert (
        outcome.plan.trial(outcome.start.values, "x", None).method["temperature"]
        == outcome.plan.config.method["temperature"]
    )


@pytest.mark.slow
def test_equal_seeds_propose_equal_values_and_others_do_not(settings: Make, tmp_path: Path) -> None:
    first, second = (tuned([config(settings)], tmp_path / name)[0] for name in ("a", "b"))
    (other,) = tuned([{**config(settings), "seed": 1}], tmp_path / "c")
    assert figures(first) == figures(second)
    assert [row.values for row in first.rows[1:]] != [row.values for row in other.rows[1:]]


@pytest.mark.parametrize("method", ["fedvpt", pytest.param("promptfl", marks=pytest.mark.slow)])
def test_poisoned_test_labels_do_not_change_a_study(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (honest,) = tuned([config(settings, method)], tmp_path / "honest", trials=3)
    prepare = ExperimentFactory.prepare

    def poisoned(self: ExperimentFactory) -> Any:
        found = prepare(self)
        held = found.manifest.clients.test.values
        found.source.labels[held] = (found.source.labels[held] + 1) % len(found.source.class_names)
        return found

    monkeypatch.setattr(ExperimentFactory, "prepare", poisoned)
    (attacked,) = tuned([config(settings, method)], tmp_path / "attacked", trials=3)
    assert figures(attacked) == figures(honest)
    assert attacked.tuned.chosen == honest.tuned.chosen


@pytest.mark.slow
def test_poisoned_validation_labels_do(settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (honest,) = tuned([config(settings)], tmp_path / "honest", trials=3)
    prepare = ExperimentFactory.prepare

    def poisoned(self: ExperimentFactory) -> Any:
        found = prepare(self)
        lists = found.manifest.clients.validation
        if lists is not None:
            found.source.labels[lists.values] = (found.source.labels[lists.values] + 1) % len(found.source.class_names)
        return found

    monkeypatch.setattr(ExperimentFactory, "prepare", poisoned)
    (attacked,) = tuned([config(settings)], tmp_path / "attacked", trials=3)
    assert figures(attacked) != figures(honest)


def test_only_validation_images_are_evaluated(settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    whole = ClientRuntime.test_together

    def watched(self: ClientRuntime, round: int, params: Any, part: str | None = None) -> Any:
        read.add(part or self.config.federation.evaluate_on)
        return whole(self, round, params, part)

    monkeypatch.setattr(ClientRuntime, "test_together", watched)
    tuned([config(settings)], tmp_path / "tune", trials=2)
    assert read == {"validation"}


class Killed(BaseException):
    """As if the process had ended."""


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "after", [pytest.param(1, marks=SLOW), 3, pytest.param(5, marks=SLOW), pytest.param(6, marks=SLOW)]
)
def test_a_study_that_was_stopped_comes_out_as_one_that_was_not(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Stopped while a trial trains: it stays `running` in the storage, with some of its rounds in its run file."""
    values = [config(settings), config(settings, "head_tune")]
    whole = tuned(values, tmp_path / "whole")
    done, committed = 0, study.Pause.committed

    def killed(self: study.Pause, record: Any) -> None:
        nonlocal done
        done += 1
        if done == after:
            raise Killed
        committed(self, record)

    monkeypatch.setattr(study.Pause, "committed", killed)
    with pytest.raises(Killed):
        tuned(values, tmp_path / "stopped")
    monkeypatch.setattr(study.Pause, "committed", committed)
    again = tuned(values, tmp_path / "stopped", resume=True)
    for before, after_it in zip(whole, again, strict=True):
        assert figures(before) == figures(after_it)
        assert before.tuned.chosen == after_it.tuned.chosen
        for name in ("trials", "pruned", "rounds", "image_passes", "value"):
            assert getattr(before.tuned, name) == getattr(after_it.tuned, name)


def test_a_study_is_not_started_twice_and_not_with_other_settings(settings: Make, tmp_path: Path) -> None:
    tuned([config(settings)], tmp_path / "tune", trials=2)
    with pytest.raises(RunError, match="exists already; continue it with --resume"):
        tuned([config(settings)], tmp_path / "tune", trials=2)
    with pytest.raises(RunError, match="--trials must be the 2 of the study that is there, got 3"):
        tuned([config(settings)], tmp_path / "tune", trials=3, resume=True)
    with pytest.raises(RunError, match="was made with another config"):
        tuned([config(settings, train={"epochs": 2})], tmp_path / "tune", trials=2, resume=True)
    with pytest.raises(RunError, match="search space must be that of the study that is there"):
        tuned([config(settings)], tmp_path / "tune", {"train.lrs.prompt": [0.1]}, trials=2, resume=True)
    before = (tmp_path / "tune/tuning.html").read_text()
    tuned([config(settings)], tmp_path / "tune", trials=2, resume=True)
    assert (tmp_path / "tune/tuning.html").read_text() == before


def test_trials_that_diverge_are_counted_and_never_chosen(settings: Make, tmp_path: Path) -> None:
    section = {"train.lrs": None, "train.lr": [0.05, 1e30]}
    (outcome,) = tuned([config(settings, train={"lr": 0.05})], tmp_path / "tune", section)
    assert outcome.tuned.diverged >= 1
    assert outcome.tuned.chosen == {"train.lr": 0.05}
    assert outcome.tuned.trials == TRIALS
    bad = config(settings, name="bad", train={"lr": 1e30})
    with pytest.raises(RunError, match="must have a trial that does not diverge, got none of 2"):
        tuned([bad], tmp_path / "bad", {"train.lrs": None, "train.lr": [1e30]}, trials=2)


@pytest.mark.slow
def test_two_processes_share_a_study(settings: Make, tmp_path: Path) -> None:
    (outcome,) = tuned([config(settings)], tmp_path / "tune", jobs=2)
    assert outcome.tuned.trials == TRIALS
    assert outcome.tuned.rounds == planned_rounds(TRIALS, ROUNDS)


@pytest.mark.slow
def test_the_best_config_runs_and_says_how_it_was_found(settings: Make, tmp_path: Path) -> None:
    outcomes = tuned([config(settings), config(settings, "head_tune")], tmp_path / "tune")
    text = outcomes[0].path.read_text()
    assert text.startswith("# Tuned by `fedprompt tune`: the best of 5 trials")
    assert "No test image was read" in text
    header = yaml.safe_load(text)["tuned"]
    assert header["data"] == ExperimentFactory(config(settings)).prepare().source.fingerprint
    assert (header["study"], header["trials"], header["seed"]) == (outcomes[0].plan.study, TRIALS, 0)
    runs = []
    for outcome in outcomes:
        (best,) = config_files.load(outcome.path)
        assert best.tuned == outcome.tuned
        assert {f"train.lrs.{key}": rate for key, rate in best.train.lrs.items()} == outcome.tuned.chosen
        runs.append(Experiment(best).run())
    assert runs[0].config.data.validation is None  # as the config says: it trains on all training images
    lines = notes(comparison(runs))
    assert any(
        line.startswith("Settings tuned on validation images: fedvpt: 5 trials (3 ended early), 9") for line in lines
    )
    plain = support.run({**config(settings, "local"), "name": "plain"})
    lines = notes(comparison([*runs, plain]))
    assert "Settings not tuned: local" in lines
    (other,) = tuned([config(settings, "local", name="short")], tmp_path / "short", trials=2)
    unfair = Experiment(config_files.load(other.path)[0]).run()
    assert any(
        line.startswith("Not tuned equally: trials 2 and 5; rounds") for line in notes(comparison([*runs, unfair]))
    )


def test_the_section_tuned_changes_no_hash(settings: Make, tmp_path: Path) -> None:
    (outcome,) = tuned([config(settings)], tmp_path / "tune", trials=1)
    (best,) = config_files.load(outcome.path)
    assert best.model_copy(update={"tuned": None}).digest() == best.digest()
    assert "tuned" not in parse({}).model_dump(mode="json")


def test_the_page_and_the_pictures_show_every_study(settings: Make, tmp_path: Path) -> None:
    outcomes = tuned([config(settings), config(settings, "head_tune")], tmp_path / "tune")
    page = (tmp_path / "tune/tuning.html").read_text()
    for each in outcomes:
        assert f">{each.plan.title}</h2>" in page
        assert (tmp_path / f"tune/{each.plan.study}-parallel.png").read_bytes().startswith(b"\x89PNG")
    assert "What each method was given" in page
    assert "train.lrs.prompt" in page.replace("<wbr>", "")


@pytest.mark.parametrize(
    ("options", "section", "message"),
    [
        ({"trials": 0}, {}, r"--trials must be in 1..100000, got 0"),
        ({"jobs": 0}, {}, r"--jobs must be in 1..256, got 0"),
        ({}, {"method.kl_weight": [1.0]}, r"tune.method.kl_weight must be a setting or a trained tensor of fedvpt"),
        ({}, {"train.lrs.gate.*": [1.0]}, r"tune.train.lrs.gate.\* must be a setting or a trained tensor of fedvpt"),
        ({}, {"train.lrs": None}, r"method must have something to tune"),
        ({}, {"fedvtp": {"train.lr": [1.0]}}, r"tune.fedvtp must be a setting, or a method of the config: fedvpt"),
        ({}, {"fedvpt": {"method.kl_weight": [1.0]}}, r"tune.fedvpt.method.kl_weight must be a setting or a trained"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_the_first_trial(
    settings: Make, tmp_path: Path, options: dict[str, Any], section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned([config(settings)], tmp_path / "tune", section, **options)
    assert not (tmp_path / "tune").exists()


def test_sites_are_not_tuned(settings: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.kind must be in-process to tune"):
        tuned([{**config(settings), "engine": "flower"}], tmp_path / "tune")
