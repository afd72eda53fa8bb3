"""The figures of a clinic for a run: its own test images, predicted again."""

from __future__ import annotations

import pytest

from fedprompt.errors import ConfigError
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit


def test_accuracies_are_those_of_the_run_file(finished: Run) -> None:
    frame = finished.metrics()
    assert frame.loc["client", "accuracy"].to_dict() == finished.client_accuracies()
    last = finished.history()[-1]
    assert frame.loc[("all", "pooled"), "accuracy"] == last["pooled"]
    assert frame.loc["domain", "accuracy"].to_dict() == pytest.approx(last["domains"])


def test_confusion_matrices_count_every_image_once(finished: Run) -> None:
    frame = finished.metrics()
    found = frame.attrs["confusion"]
    assert set(found) == set(frame.index)
    pooled = found["all", "pooled"]
    assert (sum(found["client", name] for name in finished.clients) == pooled).all(axis=None)
    assert pooled.to_numpy().sum() == sum(result["samples"] for result in finished.evaluations(2).values())


def test_a_specificity_that_is_none_is_refused(finished: Run) -> None:
    with pytest.raises(ConfigError, match=r"specificity must be in 0\.\.1, got 90"):
        finished.metrics(specificity=90)
