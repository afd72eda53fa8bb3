"""Run files that earlier versions wrote are still compared and reported.

The files in `old_runs` are real: `fedprompt run` of commit c5f95f2 (format version 1) and of f2025e6 (version 2, the last
one before the folders were renamed), FedVPT on `tiny` for two rounds. The figures are what those versions printed.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedprompt.cli import main
from fedprompt.runs.tables import FILE

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]
FIGURES = {
    "average": 0.35,
    "worst": 0.25,
    "best_average": 0.375,
    "pooled": 0.35,
    "std": 0.14691988683760793,
    "bottom_decile": 0.25,
    "ece": 0.11887765303254128,
    "bytes_up_each": 256.0,
    "bytes_down_each": 256.0,
    "bytes_total": 4096.0,
}


@pytest.fixture(params=[1, 2], ids="version{}".format)
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    packed = Path(__file__).parent / f"old_runs/version{request.param}.db.gz"
    folder = tmp_path / "runs/old-fedvpt-seed0"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedprompt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return called


def test_compare_prints_the_figures_that_the_old_version_printed(old_run: Path, call: Call) -> None:
    code, out, err = call("compare", old_run, "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert err == "note: old-fedvpt-seed0: no digests: made by an older version\n"
    assert (row["label"], row["family"], row["seeds"], row["rounds"]) == ("fedvpt", "b81e77825622e578", [0], 2)
    assert {key: row[key]["mean"] for key in FIGURES} == FIGURES


def test_report_writes_its_page(old_run: Path, call: Call, tmp_path: Path) -> None:
    assert call("report", old_run, "--output", tmp_path / "report")[0] == 0
    page = (tmp_path / "report/report.html").read_text()
    assert "35.00" in page
    assert "client_3" in page


def test_resuming_is_refused_with_a_way_out(old_run: Path, call: Call, tmp_path: Path) -> None:
    config = tmp_path / "old.yaml"
    config.write_text(
        "name: old\ndata: {source: tiny, train_per_cell: 4, test_per_cell: 2}\nbackbone: {name: tiny}\n"
        "partition: {scheme: domains, clients: 4}\nmethod: {name: fedvpt, prompt_tokens: 2}\n"
        "train: {lr: 0.05, batch_size: 8, momentum: 0.9}\nfederation: {rounds: 2}\n"
        f"output: {{directory: {old_run.parent}, cache: {tmp_path / 'cache'}, threads: 1}}\n"
    )
    code, _, err = call("run", config, "--resume")
    assert code == 5
    assert "must have format version 3 to go on" in err
    assert "give the new run another name=" in err
