"""Figures beside accuracy on the page of a run: those of the run file, and as many as a page can show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dashboard_support import begin, listed, write

from fedprompt.dashboard import class_view
from fedprompt.dashboard.views import Views
from fedprompt.metrics.accuracy import summarise
from fedprompt.metrics.scoring import score
from fedprompt.runs.class_figures import class_figures
from fedprompt.runs.run import Run
from fedprompt.runs.store import RoundRecord

pytestmark = pytest.mark.unit


def finished(directory: Path, clients: int = 3) -> Path:
    """A run of one round with the figures of real predictions."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for client in range(clients):
        draws = torch.rand(1, 12 + client, 2, generator=generator).double()
        labels, domains = torch.arange(12 + client) % 2, (torch.arange(12 + client) % 3 > 1).long().numpy()
        results.append(score(draws / draws.sum(-1, keepdim=True), labels, domains, ["art", "photo"], by_class=True))
    store = begin(directory, clients, rounds=1)
    record = RoundRecord(1, [0, 1], 0.5, 80, 40, summarise(results), {"train": 1.5})
    store.commit(record, b"", b"", {}, {client: each.to_json() for client, each in enumerate(results)}, ())
    store.close()
    return directory


def asked(views: Views, name: str = "run") -> dict[str, Any]:
    return views.classes({"id": listed(views)[name]["id"]})


def test_the_page_has_the_figures_of_the_run_file(tmp_path: Path, views: Views) -> None:
    found = class_figures(Run(finished(tmp_path / "run")))
    answer = asked(views)
    assert [row[:3] for row in answer["rows"]] == [[each.of, each.name, each.figures.images] for each in found]
    assert [row[0] for row in answer["rows"]] == ["all", "domain", "domain", "client", "client", "client"]
    names = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "sensitivity")
    expected = [[getattr(each.figures, name) for name in names] for each in found]
    assert np.array([row[3:] for row in answer["rows"]]) == pytest.approx(np.array(expected))
    assert np.sum(answer["confusion"]) == found[0].figures.images
    assert (answer["classes"], answer["specificity"]) == (["a", "b"], 0.9)
    json.dumps(answer, allow_nan=False)


def test_a_run_without_them_has_an_empty_answer(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[4, 6]])
    assert asked(views) == {"specificity": 0.9, "rows": [], "left_out": 0, "classes": [], "confusion": []}


def test_very_many_clients_and_classes_are_not_sent_to_a_page(
    tmp_path: Path, views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "run")
    monkeypatch.setattr(class_view, "MOST_ROWS", 4)
    monkeypatch.setattr(class_view, "MOST_CLASSES", 1)
    answer = asked(views)
    assert (len(answer["rows"]), answer["left_out"], answer["confusion"], answer["classes"]) == (4, 2, [], [])
    monkeypatch.setattr(class_view, "MOST_CLIENTS", 2)
    assert asked(Views(views.catalogue))["rows"] == []
