"""Figures by class come from the run file, equal to scikit-learn's; sites send none, and older files have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import run

from fedprompt.metrics import accuracy
from fedprompt.metrics.accuracy import STAYING, ClientResult, is_result, is_summary, summarise
from fedprompt.metrics.scoring import score
from fedprompt.report.html_report import render
from fedprompt.runs.class_figures import class_figures
from fedprompt.runs.run import Run
from fedprompt.runs.verify import verify

pytestmark = pytest.mark.unit


def draws_of(seed: int, images: int = 60, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (images,), generator=generator)  # one class has no images
    logits = torch.randn(2, images, classes, generator=generator)
    logits[:, torch.arange(images), labels] += 1
    return logits.softmax(-1).double(), labels, (torch.arange(images) % 2).numpy()


@pytest.mark.parametrize("seed", range(4))
def test_stored_figures_are_those_of_scikit_learn(seed: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draws, labels, domains = draws_of(seed)
    found = score(draws, labels, domains, ["art", "photo"], by_class=True)
    probabilities, truth = draws.mean(0).numpy(), labels.numpy()
    matrix = np.zeros((4, 4), int)
    for domain, label, guess, count in found.confusion or []:
        here = domains == ["art", "photo"].index(domain)
        assert ((truth == label) & (probabilities.argmax(1) == guess) & here).sum() == count
        matrix[label, guess] += count
    assert (matrix == metrics.confusion_matrix(truth, probabilities.argmax(1), labels=range(4))).all()
    areas = [metrics.roc_auc_score(truth == each, probabilities[:, each]) for each in range(3)]
    assert found.auroc == pytest.approx(np.mean(areas))


def test_a_round_before_the_last_and_a_site_have_none() -> None:
    draws, labels, domains = draws_of(0)
    plain = score(draws, labels, domains, ["a", "b"])
    assert not {"confusion", "auroc", "sensitivity"} & plain.to_json().keys()
    whole = score(draws, labels, domains, ["a", "b"], by_class=True)
    assert {"confusion", "auroc", "sensitivity"} <= whole.to_json().keys()
    assert not set(STAYING) & whole.to_send().to_json().keys()
    assert whole.to_send() == replace(plain, hits=None)


def test_one_class_alone_has_no_auroc_and_no_nan_is_stored() -> None:
    found = score(torch.ones(1, 3, 2) / 2, torch.zeros(3, dtype=torch.int64), np.zeros(3, int), ["all"], by_class=True)
    assert (found.auroc, found.sensitivity) == (None, None)
    assert "auroc" not in found.to_json()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("finished")
    return run({
        "name": "tiny", "seed": 0, "data": {"source": "tiny", "train_per_cell": 4, "test_per_cell": 3},
        "partition": {"scheme": "dirichlet", "clients": 3, "alpha": 1.0}, "backbone": {"name": "tiny"},
        "method": {"name": "head_tune"}, "train": {"lr": 0.05, "batch_size": 8}, "federation": {"rounds": 2},
        "output": {"directory": str(folder / "runs"), "cache": str(folder / "cache"), "threads": 1},
    })  # fmt: skip


def test_a_run_file_has_them_for_clients_domains_and_all(finished: Run) -> None:
    found = class_figures(finished)
    assert [each.of for each in found] == ["all"] + ["domain"] * 4 + ["client"] * 3
    assert verify(finished.reader).problems == ()
    again = finished.metrics()
    pooled = found[0].figures
    assert (pooled.confusion == again.attrs["confusion"][("all", "pooled")].to_numpy()).all()
    rows = {"all": "pooled"}
    for each in found:
        for key, value in each.figures.to_dict().items():
            expected = again.loc[(each.of, rows.get(each.of, each.name)), key]
            assert value == pytest.approx(expected, nan_ok=True), (each, key)
    assert 0 < pooled.auroc < 1
    assert all(0 < each.figures.sensitivity <= 1 for each in found if each.of == "domain")


def test_those_of_all_images_are_those_of_scikit_learn_and_not_a_mean_over_clients() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    drawn = [draws_of(seed, images=20 + 10 * seed) for seed in range(3)]
    results = [score(*each, ["art", "photo"], by_class=True) for each in drawn]
    summary = summarise(results)
    of = {
        name: {key: summary[f"{key}_by_domain"][name] for key in ("auroc", "sensitivity")} for name in ("art", "photo")
    }
    probabilities, truth = (
        np.concatenate([draws.mean(0) for draws, _, _ in drawn]),
        np.concatenate([y for _, y, _ in drawn]),
    )
    domains = np.concatenate([each for _, _, each in drawn])
    for found, here in [
        (summary["ranked"], domains >= 0),
        (of["art"], domains == 0),
        (of["photo"], domains == 1),
    ]:
        areas, best = [], []
        for number in range(3):
            false, true, _ = metrics.roc_curve(
                truth[here] == number, probabilities[here, number], drop_intermediate=False
            )
            areas.append(metrics.auc(false, true))
            best.append(true[false <= 0.1 + 1e-12].max())
        assert found == pytest.approx({"auroc": np.mean(areas), "sensitivity": np.mean(best)})
    assert summary["ranked"]["auroc"] != pytest.approx(np.mean([each.auroc for each in results]), abs=1e-6)


def test_they_are_left_out_where_a_site_sends_none_and_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = [score(*draws_of(seed), ["a", "b"], by_class=True) for seed in range(2)]
    assert "ranked" not in summarise([results[0], results[1].to_send()])
    monkeypatch.setattr(accuracy, "MOST_SCORES", 100)
    assert "ranked" not in summarise(results)


def test_predictions_are_not_stored_and_not_sent(finished: Run) -> None:
    whole = score(*draws_of(0), ["a", "b"], by_class=True)
    assert whole.scores is not None
    assert whole.to_send().scores is None
    assert "scores" not in whole.to_json()
    assert all("scores" not in result for result in finished.evaluations(2).values())


@pytest.mark.parametrize("ranked", [[], 0.5, {"auroc": "1"}])
def test_ranks_that_cannot_be_are_damage(ranked: Any) -> None:
    summary = summarise([score(*draws_of(0), ["a", "b"], by_class=True)])
    assert is_summary(summary)
    assert not is_summary({**summary, "ranked": ranked})


def test_only_the_last_round_has_them(finished: Run) -> None:
    assert all("confusion" not in result for result in finished.evaluations(1).values())
    assert all("confusion" in result for result in finished.evaluations(2).values())


def test_the_report_shows_them(finished: Run) -> None:
    text = render([finished])
    assert "Classification metrics" in text
    assert "Balanced accuracy" in text
    assert "Sensitivity at 0.9 specificity" in text


def test_a_run_file_without_them_is_read_as_before(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(round: int) -> dict[int, dict[str, Any]]:
        stored = Run.evaluations(finished, round)
        return {client: {k: v for k, v in each.items() if k not in STAYING} for client, each in stored.items()}

    opened = Run(finished.directory)
    monkeypatch.setattr(opened, "evaluations", older)
    assert class_figures(opened) == []
    assert "Classification metrics" not in render([opened])


@pytest.mark.parametrize(
    "confusion",
    [
        [["a", 0, 0, 2]],
        [["a", 0, 0]],
        [[1, 0, 0, 3]],
        [["a", -1, 0, 3]],
        [["a", 0.5, 0, 3]],
        "aaaa",
        [["a", True, 0, 3]],
    ],
)
def test_cells_that_cannot_be_are_damage(confusion: Any) -> None:
    values = ClientResult(3, 2).to_json()
    assert is_result({**values, "confusion": [["a", 0, 0, 2], ["a", 0, 1, 1]]})
    assert not is_result({**values, "confusion": confusion})
