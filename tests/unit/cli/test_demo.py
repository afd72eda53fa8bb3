"""`fedprompt demo`: a run of a packaged config and its report, continued after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedprompt.cli import starter
from fedprompt.config import config_files

pytestmark = pytest.mark.unit


def test_the_config_is_a_file_of_the_package() -> None:
    assert not starter.DEMO.is_symlink()
    assert len(config_files.load(starter.DEMO)) >= 2


def test_it_runs_writes_the_report_and_goes_on_after_a_stop(
    fedprompt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "demo.yaml"
    text = "data: {source: tiny, train_per_cell: 2, test_per_cell: 1}\nbackbone: tiny\nmethod: head_tune\n"
    config.write_text(text + "partition: {clients: 4}\nfederation: {rounds: 2}\noutput: {threads: 1}\n")
    monkeypatch.setattr(starter, "DEMO", config)
    told = fedprompt("demo", "--quiet")
    assert told.code == 0, told.err
    assert "report: runs/report-demo/report.html" in told.err
    assert "head_tune" in (tmp_path / "runs/report-demo/report.html").read_text()
    before = (tmp_path / "runs/demo-head_tune-seed0/run.db").read_bytes()
    assert fedprompt("demo", "--quiet").code == 0
    assert (tmp_path / "runs/demo-head_tune-seed0/run.db").read_bytes() == before
