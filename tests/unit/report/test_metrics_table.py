"""`report --metrics`: figures beside accuracy, from the test images of real runs."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.errors import ConfigError
from fedprompt.report.html_report import write_report
from fedprompt.report.method_grid import arrange
from fedprompt.report.metrics_table import HEAD, metrics_part

pytestmark = pytest.mark.unit


def test_a_row_is_the_mean_of_what_its_runs_say(runs) -> None:
    pytest.importorskip("pandas")
    (table,) = metrics_part(arrange(runs), 0.8).tables
    assert table.head == HEAD
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    frames = [run.metrics(0.8) for run in runs[:2]]
    for place, key in ((0, "accuracy"), (1, "balanced_accuracy"), (4, "auroc"), (5, "sensitivity")):
        mean = 100 * sum(frame.loc[("all", "pooled"), key] for frame in frames) / 2
        assert float(rows["fedvpt"][place].split(" ±")[0]) == pytest.approx(mean, abs=0.006), key
    lowest = 100 * sum(frame.loc["client"]["balanced_accuracy"].min() for frame in frames) / 2
    assert float(rows["fedvpt"][2].split(" ±")[0]) == pytest.approx(lowest, abs=0.006)
    assert not any(math.isnan(float(text.split(" ±")[0])) for texts in rows.values() for text in texts)


def test_the_page_has_them_only_where_they_are_asked_for(runs, tmp_path) -> None:
    pytest.importorskip("pandas")
    plain = write_report(runs[:1], tmp_path / "plain").html.read_text()
    full = write_report(runs[:1], tmp_path / "full", specificity=0.9).html.read_text()
    assert 'id="beside-accuracy"' not in plain
    assert '<h2 id="beside-accuracy">' in full
    assert "at a specificity of at least 90%" in full
    assert "<summary>Numbers" not in full.partition('id="beside-accuracy"')[2].partition("<h2")[0]


def test_a_specificity_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"--metrics must be in 0..1, got 90"):
        CliRunner().invoke(app, ["report", "runs", "--metrics", "90"], catch_exceptions=False)
