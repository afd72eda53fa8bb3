"""Rounds are evaluated on validation images, the best one is chosen, and test images are read once, at the end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from rich.console import Console

from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import parse
from fedprompt.core import wire
from fedprompt.core.method import Client, World
from fedprompt.errors import ConfigError, DataError, RunError
from fedprompt.experiment.progress import LiveProgress
from fedprompt.experiment.sites import SitesExperiment
from fedprompt.federation.best_round import best_round, is_over
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.methods.local import Local
from fedprompt.report.comparison_table import comparison, notes
from fedprompt.report.html_report import render
from fedprompt.runs.run import Run
from fedprompt.runs.store import BEST
from fedprompt.tensors import Tensors

Make = Callable[..., dict[str, Any]]
VALIDATION = {"evaluate_on": "validation", "evaluate_last": 1}


def config(settings: Make, **federation: Any) -> dict[str, Any]:
    method = {"name": "local", "prompt_init": "random"}  # keeps its head: the chosen round needs client states
    return settings(
        data={"train_per_cell": 12, "validation": 0.25},
        method=method,
        train={"lr": 1.0},
        federation={"rounds": 6, **VALIDATION, **federation},
    )


def make_best(monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    """Evaluations of all rounds but one use the worst class in place of the best: that round is best on every machine."""

    def reversed_but_once(self: Local, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = self.begin(world, client, received, local)
        return params if client.round == good else {**params, "head.weight": -params["head.weight"]}

    monkeypatch.setattr(Local, "personalise", reversed_but_once)


def test_the_first_of_equally_good_rounds_is_the_best() -> None:
    assert best_round({1: 0.5, 2: 0.7, 3: 0.7, 4: 0.6}) == 2
    assert best_round({}) is None


def test_patience_counts_rounds_since_the_best_one() -> None:
    averages = {1: 0.5, 2: 0.7, 3: 0.6}
    assert not is_over(averages, 2)
    assert is_over({**averages, 4: 0.7}, 2)
    assert not is_over({**averages, 4: 0.8}, 2)
    assert not is_over({**averages, 9: 0.1}, None)


def test_rounds_are_evaluated_on_validation_images_and_test_images_are_counted_once_at_the_end(settings: Make) -> None:
    run = support.run(config(settings))
    held = run.manifest().clients
    for round in range(1, 7):
        assert [each["samples"] for each in run.evaluations(round).values()] == [len(c.validation) for c in held]
    assert [each["samples"] for each in run.final_results().values()] == [len(c.test) for c in held]
    assert run.final_test is not None
    assert run.finished


def test_the_final_test_of_the_last_round_is_what_a_run_evaluated_on_test_images_finds(settings: Make) -> None:
    once = support.run(config(settings))
    usual = support.run({**config(settings, evaluate_on="test"), "name": "usual"})
    assert once.final_results() == usual.evaluations(6)
    assert once.summary()["average"] == usual.history()[-1]["average"]
    assert support.shared_tensors(once).keys() == support.shared_tensors(usual).keys()


def test_no_test_image_is_read_before_the_last_round(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = ClientRuntime.test_together

    def watched(self: ClientRuntime, round: int, params: Any, part: str | None = None) -> Any:
        read.append(part or self.config.federation.evaluate_on)
        return whole(self, round, params, part)

    monkeypatch.setattr(ClientRuntime, "test_together", watched)
    support.run(config(settings))
    assert read[-1] == "test"
    assert set(read[:-1]) == {"validation"}
    read.clear()
    support.experiment({**config(settings), "name": "untested"}).run(test=False)
    assert set(read) == {"validation"}


def test_the_best_round_is_tested_with_its_own_server_and_client_states(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends at that round, tested with its last parameters, gives the same figures."""
    make_best(monkeypatch, good=3)
    values = config(settings, select="best")
    run = support.run(values)
    averages = {entry["round"]: entry["average"] for entry in run.history()}
    assert run.final_test is not None
    chosen = run.final_test.round
    assert chosen == best_round(averages) == 3
    assert averages[chosen] > averages[6]
    short = support.run({**config(settings, rounds=chosen, evaluate_on="test"), "name": "short"})
    assert run.final_results() == short.evaluations(chosen)
    kept = Run(run.directory / BEST)
    assert wire.decode(kept.reader.client_state(0) or b"").keys()
    for client in range(4):
        assert support.worst_difference(support.local_tensors(kept, client), support.local_tensors(short, client)) == 0
    used = LoadedRun.open(run.directory, trust_config=True)
    assert used.round == chosen
    state = used.states().get(1)
    assert state is not None
    assert support.worst_difference(state, support.local_tensors(short, 1)) == 0


def test_the_best_round_is_tested_with_its_own_pool(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedprompt.federation.best_round.best_round", lambda averages: min(3, max(averages, default=0)))
    clip = {"method": {"name": "pfedmoap"}, "backbone": {"name": "tiny-clip"}, "train": {"lr": 0.3, "batch_size": 8}}
    run = support.run({**config(settings, select="best"), **clip})
    assert run.final_test is not None
    assert run.final_test.round == 3
    short = support.run({**config(settings, rounds=3, evaluate_on="test"), **clip, "name": "short"})
    assert run.final_results() == short.evaluations(3)


@pytest.mark.parametrize("stop", [2, 6, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 3, 5))])
def test_a_resumed_run_chooses_and_tests_as_one_without_interruption(settings: Make, stop: int, tmp_path: Path) -> None:
    """The interruption comes after the commit and before the copy of the best round."""
    values = config(settings, select="best", patience=4)
    whole = support.run(values)
    assert whole.final_test is not None
    other = {**values, "output": {**values["output"], "directory": str(tmp_path / "again")}}
    with pytest.raises(support.Stopped):
        support.run(other, observer=support.StopAfter(stop))
    again = support.run(other, resume=True)
    assert again.final_test == whole.final_test
    assert again.final_results() == whole.final_results()
    assert [record.round for record in again.rounds()] == [record.round for record in whole.rounds()]
    assert support.content(again) == support.content(whole)


def test_a_finished_run_that_is_resumed_does_not_test_again(settings: Make) -> None:
    values = config(settings, select="best")
    before = support.content(support.run(values))
    assert support.content(support.run(values, resume=True)) == before


def test_a_run_ends_when_patience_is_over_and_is_finished(settings: Make) -> None:
    run = support.run(config(settings, rounds=30, patience=2))
    averages = {entry["round"]: entry["average"] for entry in run.history()}
    last = run.rounds()[-1].round
    assert last < 30
    assert last - (best_round(averages) or 0) == 2
    assert run.finished
    rows = comparison([run])
    assert rows[0].finished
    assert rows[0].title == "local"


def test_seeds_that_end_at_different_rounds_share_a_row(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for seed, good in ((0, 1), (1, 2)):
        make_best(monkeypatch, good)
        runs.append(support.run({**config(settings, rounds=8, patience=2), "seed": seed}))
    assert [run.rounds()[-1].round for run in runs] == [3, 4]
    (row,) = comparison(runs)
    assert row.seeds == (0, 1)


def test_a_copy_of_another_round_or_run_is_refused(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_best(monkeypatch, good=3)
    values = config(settings, select="best")
    with pytest.raises(support.Stopped):
        support.run(values, observer=support.StopAfter(6))
    directory = Path(values["output"]["directory"])
    (kept,) = directory.glob(f"*/{BEST}")
    other = support.run({**config(settings, select="best", rounds=5), "name": "other"})
    kept.write_bytes((other.directory / "run.db").read_bytes())
    with pytest.raises(RunError, match=r"best.db must be the copy of this run after round"):
        support.run(values, resume=True)


@pytest.mark.parametrize("method", ["local", "promptfl"])
def test_poisoned_test_labels_change_the_final_test_and_nothing_before(settings: Make, method: str) -> None:
    """Not even the label check of a method that reads class names."""
    text = {"backbone": {"name": "tiny-clip"}} if method == "promptfl" else {}
    values = {**config(settings, select="best", patience=4), "method": {"name": method}, **text}
    honest = support.run(values)
    poisoned = support.experiment({**values, "name": "poisoned"})
    prepared = poisoned.factory.prepare
    held = honest.manifest().clients.test.values

    def poison() -> Any:
        found = prepared()
        found.source.labels[held] = (found.source.labels[held] + 1) % len(found.source.class_names)
        return found

    poisoned.factory.prepare = poison  # type: ignore[method-assign]
    run = poisoned.run()
    assert run.history() == honest.history()
    assert run.reader.fact("label_check") == honest.reader.fact("label_check")
    assert run.final_test is not None
    assert honest.final_test is not None
    assert run.final_test.round == honest.final_test.round
    assert run.final_test.summary != honest.final_test.summary


def test_a_run_in_progress_says_that_its_figures_are_of_validation_images(settings: Make) -> None:
    values = config(settings)
    with pytest.raises(support.Stopped):
        support.run(values, observer=support.StopAfter(3))
    (directory,) = Path(values["output"]["directory"]).iterdir()
    run = Run(directory)
    assert run.summary()["images"] == "validation"
    assert not run.finished
    assert any("validation images, not of test images" in line for line in notes(comparison([run])))
    page = render([run])
    assert "Accuracy on validation images (%)" in page  # learning curves
    assert "seed 0, validation images" in page  # clients by round
    assert "Average (validation)" in page
    paper = io.StringIO()
    done = support.run(values, resume=True, observer=LiveProgress(Console(file=paper, width=200)))
    last_round, end = [line for line in paper.getvalue().splitlines() if "Average" in line][-2:]
    assert f"Average (validation) {100 * done.history()[-1]['average']:.2f} %" in last_round
    assert f"Average {100 * done.summary()['average']:.2f} %" in end
    assert end.endswith("(test images, round 6)")
    page = render([done])
    assert "Accuracy on validation images (%)" in page  # of rounds
    assert "Accuracy in the last round (%)" in page  # of the final test
    assert "test images, read once with the parameters of round 6; of rounds: validation images" in page
    assert done.summary()["images"] == "test"
    assert any(line.startswith("Test images were read: local: once") for line in notes(comparison([done])))


@pytest.mark.slow
def test_workers_validate_and_test_as_one_process_does(settings: Make) -> None:
    values = config(settings, select="best", rounds=3)
    alone = support.run(values)
    workers = support.run({**values, "name": "workers", "engine": {"workers": 2, "cohort": 1}})
    assert workers.final_test is not None
    assert alone.final_test is not None
    assert workers.final_test.round == alone.final_test.round
    assert np.isclose(workers.final_test.summary["nll"], alone.final_test.summary["nll"], rtol=1e-2)


@pytest.mark.parametrize(
    ("federation", "message"),
    [
        ({"select": "best", "evaluate_on": "test"}, "no round may be chosen on test images"),
        ({"patience": 3, "evaluate_on": "test"}, "no round may be chosen on test images"),
        ({"patience": 0}, "federation.patience must be greater than or equal to 1"),
    ],
)
def test_a_round_is_not_chosen_on_test_images(settings: Make, federation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(config(settings, **federation))


def test_an_evaluation_on_validation_images_needs_some(settings: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"have evaluate_on: test unless data.validation is given"):
        parse(settings(federation=VALIDATION))
    run = support.run(settings())
    run.manifest().save(tmp_path / "m.json")
    manifest = {"scheme": "manifest", "manifest": str(tmp_path / "m.json")}
    with pytest.raises(DataError, match="validation images"):
        support.run(settings(name="other", partition=manifest, federation=VALIDATION))


def test_sites_and_simulated_nodes_are_refused(settings: Make) -> None:
    values = config(settings)
    with pytest.raises(ConfigError, match=r"data.validation must be absent where clients are sites"):
        SitesExperiment({**values, "engine": "flower"})
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"federation.evaluate_on must be test with engine.kind: flower-simulation"):
        support.run({**values, "engine": "flower-simulation"})


def test_features_in_the_cache_do_not_depend_on_the_split(settings: Make, tmp_path: Path) -> None:
    support.run(settings(data={"train_per_cell": 12}))
    files = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    support.run(config(settings))
    assert {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()} == files


def test_an_old_run_without_the_settings_is_resumed(settings: Make) -> None:
    values = settings()
    with pytest.raises(support.Stopped):
        support.run(values, observer=support.StopAfter(1))
    explicit = {**values, "data": {**values["data"], "validation": None}}
    explicit["federation"] = {**values["federation"], "evaluate_on": "test", "select": "last", "patience": None}
    assert support.run(explicit, resume=True).finished


def test_tensors_of_the_chosen_round_are_those_that_predict(settings: Make) -> None:
    run = support.run(config(settings, select="best"))
    used = LoadedRun.open(run.directory, trust_config=True)
    kept = Run(run.directory / BEST)
    stored = kept.reader.server_state()
    assert stored is not None
    assert run.final_test is not None
    assert stored[0] == used.round == run.final_test.round
    shared = wire.decode(stored[1])
    assert all(torch.equal(shared[name], tensor) for name, tensor in used.server.shared.items())
