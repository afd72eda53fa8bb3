"""What uncertainty is worth: answers are those of the run, scores by hand, draws as prefixes, ensembles as means."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from remote_run import tiny_settings
from support import run
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.data.partition.split import train_and_test
from fedprompt.data.sources.open import open_whole
from fedprompt.errors import ConfigError
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.uncertainty import Answers, accuracy_by_draws, answers, ensemble, scored, worth
from fedprompt.inference.uncertainty_rows import of_runs
from fedprompt.metrics.selective import Selective
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit

NOBODYS = np.empty((1, 0, 2))
BAYES = {"name": "pfedbayespt", "prompt_tokens": 2, "predict_draws": 3, "diagnose": True}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Clients with two of the five classes, and three draws in a prediction."""
    folder = tmp_path_factory.mktemp("uncertainty")
    partition = {"scheme": "classes", "clients": 4, "classes_per_client": 2}
    return run(tiny_settings(folder, "drawn", method=BAYES, partition=partition))


def test_answers_are_those_of_the_runs_evaluation(finished: Run, drawn: Run) -> None:
    for each in (finished, drawn):
        results = each.evaluations(2).values()
        found = answers(each)
        assert len(found.labels) == sum(result["samples"] for result in results)
        assert (~found.wrong).sum() == sum(result["correct"] for result in results)


def test_unknown_images_are_those_of_classes_without_a_training_image(finished: Run, drawn: Run) -> None:
    assert answers(finished).unknown.shape[1] == 0  # every client has every class
    bank, clients = LoadedRun.open(drawn.directory).bank(), range(len(drawn.clients))
    train, test = ([bank.images(client, part).labels.tolist() for client in clients] for part in ("train", "test"))
    strange = sum(label not in train[client] for client in clients for labels in test for label in labels)
    assert strange > 0
    assert answers(drawn).unknown.shape[:2] == (3, strange)


def test_another_number_of_draws_needs_no_training(drawn: Run) -> None:
    found = answers(drawn, 5)
    by_draws = accuracy_by_draws(found)
    assert len(by_draws) == len(found.draws) == 5
    assert by_draws[-1] == pytest.approx(1 - found.wrong.mean())
    first = found.draws[:1].mean(0).argmax(-1) == found.labels
    assert by_draws[0] == pytest.approx(first.mean())
    with pytest.raises(ConfigError, match="--draws must be at least 1, got 0"):
        answers(drawn, 0)


def test_figures_are_those_counted_by_hand() -> None:
    draws = np.array([[[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], [[0.7, 0.3], [0.2, 0.8], [0.4, 0.6]]])
    found = {
        each.score: each
        for each in worth(Answers(draws, np.array([0, 0, 1]), np.full((2, 2, 2), 0.5), np.empty((2, 0, 2))))
    }
    assert list(found) == ["confidence", "entropy", "mutual information"]
    figures = found["entropy"].figures  # means: (0.8, 0.2) right, (0.4, 0.6) wrong, (0.3, 0.7) right
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["errors"] == 1.0
    assert figures["aurc"] == pytest.approx((0 + 0 + 1 / 3) / 3)
    assert figures["selective"] == 1.0  # two of three images
    assert figures["unknown"] == 1.0  # the even ones are the least certain
    assert figures["ece"] == pytest.approx((0.2 + 0.6 + 0.3) / 3)
    assert figures["nll"] == pytest.approx(-np.log([0.8, 0.4, 0.7]).mean())
    assert found["mutual information"].figures["unknown"] == 0.0  # their draws agree


def test_one_draw_has_no_mutual_information_and_right_answers_no_auroc() -> None:
    found = Answers(np.array([[[0.9, 0.1], [0.2, 0.8]]]), np.array([0, 1]), NOBODYS, NOBODYS)
    assert list(scored(found.draws)) == ["confidence", "entropy"]
    figures = worth(found)[0].figures
    assert "errors" not in figures
    assert "unknown" not in figures
    json.dumps(figures, allow_nan=False)


def test_an_ensemble_averages_its_members_and_needs_the_same_images() -> None:
    one = Answers(np.array([[[0.9, 0.1]]]), np.array([0]), NOBODYS, NOBODYS)
    other = Answers(np.array([[[0.3, 0.7]]]), np.array([0]), NOBODYS, NOBODYS)
    assert ensemble([one, other]).probabilities == pytest.approx(np.array([[0.6, 0.4]]))
    with pytest.raises(ConfigError, match="same clients and test images"):
        ensemble([one, Answers(one.draws, np.array([1]), one.unknown, one.novel)])


def test_the_command_prints_a_line_for_every_score_and_draws_two_pictures(drawn: Run, tmp_path: Path) -> None:
    arguments = ["uncertainty", str(drawn.directory), "--draws", "2", "--json", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert [line["score"] for line in said["rows"]] == ["confidence", "entropy", "mutual information"]
    found = answers(drawn, 2)
    entropy = Selective.of(scored(found.draws)["entropy"], found.wrong)
    assert said["rows"][1]["figures"]["aurc"]["mean"] == pytest.approx(entropy.aurc)
    assert said["accuracy_by_draws"] == {"pfedbayespt": [accuracy_by_draws(found)]}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{name}.{kind}" for name in ("risk-coverage", "accuracy-by-draws") for kind in ("png", "svg")}


def test_novel_images_are_the_test_images_of_the_classes_that_are_kept_out(drawn: Run, tmp_path: Path) -> None:
    data = {"source": "tiny", "classes": list(drawn.reader.fact("classes"))[:3]}
    kept = run(tiny_settings(tmp_path, "kept", method={"name": "fedvpt", "prompt_tokens": 2}, data=data))
    whole = open_whole(kept.config.data, tmp_path)
    out = [name for name in whole.class_names if name not in data["classes"]]
    tests = train_and_test(whole, kept.config.data)[1]
    expected = sum(whole.class_names[label] in out for label in whole.labels[tests])
    found = answers(kept, novel=True)
    assert expected > 0
    assert found.novel.shape == (1, expected * len(kept.clients), 3)
    assert "novel" in worth(found)[0].figures
    assert answers(kept).novel.shape[1] == 0  # nobody asked
    with pytest.raises(ConfigError, match="--novel must be given with a run whose data"):
        answers(drawn, novel=True)


def test_a_report_has_the_section_where_it_is_asked_for_with_seeds_of_one_partition_as_an_ensemble(
    tmp_path: Path,
) -> None:
    method, partition = {"name": "fedvpt", "prompt_tokens": 2}, {"scheme": "iid", "clients": 2, "seed": 0}
    both = [
        run(tiny_settings(tmp_path, f"seed{seed}", method=method, partition=partition, seed=seed)) for seed in (0, 1)
    ]
    folders = [str(each.directory) for each in both]
    for name, options in (("plain", []), ("full", ["--uncertainty"])):
        done = CliRunner().invoke(app, ["report", *folders, "--output", str(tmp_path / name), *options])
        assert done.exit_code == 0, done.output
    assert "what-uncertainty-is-worth" not in (tmp_path / "plain" / "report.html").read_text()
    section = (tmp_path / "full" / "report.html").read_text().partition('<h2 id="what-uncertainty-is-worth">')[2]
    assert "ensemble of 2: fedvpt" in section
    assert "AUROC novel" not in section  # no class is kept out
    together = worth(ensemble([answers(each) for each in both]))[0]
    lines = {line.row: line for line in of_runs(both, ensemble=True).lines}
    assert lines["ensemble of 2: fedvpt"].figures["accuracy"].mean == pytest.approx(together.figures["accuracy"])


def test_one_run_is_no_ensemble(drawn: Run) -> None:
    done = CliRunner().invoke(app, ["uncertainty", str(drawn.directory), "--ensemble"])
    assert isinstance(done.exception, ConfigError)
    assert "at least two runs" in str(done.exception)
