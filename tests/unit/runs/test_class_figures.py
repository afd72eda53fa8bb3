"""Figures by class come from the run file, equal to scikit-learn's; sites send none, and older files have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import run

from fedprompt.metrics.accuracy import STAYING, ClientResult, is_result
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
    pooled, clients = found[0].figures, {each.name: each.figures for each in found if each.of == "client"}
    for key in ("images", "accuracy", "balanced_accuracy", "macro_f1"):
        assert getattr(pooled, key) == pytest.approx(again.loc[("all", "pooled"), key])
    assert (pooled.confusion == again.attrs["confusion"][("all", "pooled")].to_numpy()).all()
    for name, figures in clients.items():
        for key, value in figures.to_dict().items():
            assert value == pytest.approx(again.loc[("client", name), key], nan_ok=True)
    for each in found:
        if each.of == "domain":
            assert each.figures.balanced_accuracy == pytest.approx(
                again.loc[("domain", each.name), "balanced_accuracy"]
            )


def test_only_the_last_round_has_them(finished: Run) -> None:
    assert all("confusion" not in result for result in finished.evaluations(1).values())
    assert all("confusion" in result for result in finished.evaluations(2).values())


def test_the_report_shows_them(finished: Run) -> None:
    text = render([finished])
    assert "Figures by class" in text
    assert "Balanced accuracy" in text
    assert "Sensitivity at 90% specificity" in text


def test_a_run_file_without_them_is_read_as_before(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(round: int) -> dict[int, dict[str, Any]]:
        stored = Run.evaluations(finished, round)
        return {client: {k: v for k, v in each.items() if k not in STAYING} for client, each in stored.items()}

    opened = Run(finished.directory)
    monkeypatch.setattr(opened, "evaluations", older)
    assert class_figures(opened) == []
    assert "Figures by class" not in render([opened])


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
