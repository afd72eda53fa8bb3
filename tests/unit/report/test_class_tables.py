"""Figures beside accuracy in the report: those of the run files, or computed again at a specificity of one's own."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.errors import ConfigError
from fedprompt.report import class_tables
from fedprompt.report.class_tables import NAMES, computed, stored
from fedprompt.report.html_report import write_report
from fedprompt.report.method_grid import arrange

pytestmark = pytest.mark.unit


def test_a_row_of_a_method_is_the_mean_of_what_its_runs_say(runs) -> None:
    pytest.importorskip("pandas")
    found = stored(runs)
    (column,) = arrange(runs).columns
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in class_tables.rows_by_method(found, column)}
    frames = [run.metrics() for run in runs[:2]]
    for place, key in zip((0, 1, 3, 4, 5), NAMES, strict=True):
        mean = 100 * sum(frame.loc[("all", "pooled"), key] for frame in frames) / 2
        assert float(rows["fedvpt"][place].split(" ±")[0]) == pytest.approx(mean, abs=0.006), key
    lowest = 100 * sum(frame.loc["client"]["balanced_accuracy"].min() for frame in frames) / 2
    assert float(rows["fedvpt"][2].split(" ±")[0]) == pytest.approx(lowest, abs=0.006)
    assert len(class_tables.head_by_method(found)) == 1 + len(rows["fedvpt"])


def test_what_is_computed_again_is_what_was_stored(runs) -> None:
    pytest.importorskip("pandas")
    one, other = stored(runs[:1]), computed(runs[:1], 0.9)
    assert class_tables.rows_by_run(one) == class_tables.rows_by_run(other)
    stricter = computed(runs[:1], 1.0)
    assert class_tables.rows_by_run(stricter) != class_tables.rows_by_run(one)
    assert class_tables.head_by_run(stricter)[-1] == "Sensitivity at 1 specificity"


def test_the_page_has_one_section_with_a_sensitivity(runs, tmp_path) -> None:
    pytest.importorskip("pandas")
    for name, specificity, title in (("stored", None, "at 0.9 spec"), ("computed", 0.8, "at 0.8 spec")):
        page = write_report(runs[:1], tmp_path / name, specificity=specificity).html.read_text()
        assert page.count('<h2 id="classification-metrics">') == 1
        part = page.partition('id="classification-metrics"')[2].partition("<h2")[0]
        assert f"Sensitivity {title}" in part
        assert "Sensitivity" not in page.replace(part, "")
        assert ("predicted again" in part) == (specificity is not None)


def test_a_specificity_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"--metrics must be in 0..1, got 90"):
        CliRunner().invoke(app, ["report", "runs", "--metrics", "90"], catch_exceptions=False)
