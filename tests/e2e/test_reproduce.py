"""A paper's table from the command line: a grid that is killed, a cell that breaks, what is printed and what is stored."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import content
from warm_processes import Started, call

from fedprompt.runs.run import Run

pytestmark = pytest.mark.e2e

ROWS = [{"title": "Head-Tune", "where": {"method.name": "head_tune"}, "average": ["50.5 ± 1", 60], "worst": [40, None]}]
COLUMNS = [{"title": f"m = {m}", "where": {"partition.domains_per_client": m}} for m in (1, 3)]


@pytest.fixture
def table(tmp_path: Path, settings: Any) -> Any:
    """A small paper: two methods in two settings, with published numbers for some of it."""

    def write(rounds: int = 2, **changes: Any) -> Path:
        values = settings(
            name="mine",
            federation={"rounds": 9, "evaluate_last": 1, "evaluate_every": 10},
            sweep={
                "partition.domains_per_client": [1, 2],
                "method": [{"name": "head_tune"}, {"name": "fedvpt", "prompt_tokens": 2}],
            },
            **changes,
        )
        values["scales"] = {"small": {"federation": {"rounds": rounds}}}
        values["published"] = {"paper": "Mine", "columns": COLUMNS, "rows": ROWS}
        values["output"] = {"threads": 1, "cache": "cache"}
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def stored(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs/results/mine-small.json").read_text())  # type: ignore[no-any-return]


def runs_of(folder: Path) -> dict[str, Run]:
    return {path.name: Run(path) for path in sorted((folder / "runs").glob("mine-*"))}


def test_a_grid_is_run_printed_beside_the_papers_numbers_and_stored(tmp_path: Path, table: Any) -> None:
    table()
    done = call(tmp_path, "reproduce", "mine.yaml", "--scale", "small", "--seed", "0,1")
    assert done.code == 0, done.words
    assert "run 2 of 8 · 1 of 8 runs finished, about 0:00:" in done.words
    assert "| 50.50 ± 1.00" in done.words
    assert "Not the paper's setting: rounds 9, here 2." in done.words
    found = stored(tmp_path)
    assert found["commands"] == ["fedprompt reproduce mine.yaml --scale small --seed 0,1"]
    assert found["data"][0]["fingerprint"]
    assert {run["status"] for cell in found["cells"] for run in cell.get("runs", [])} == {"finished"}
    (cell,) = [cell for cell in found["cells"] if (cell["row"], cell["column"]) == ("fedvpt", "m = 2")]
    for run in cell["runs"]:
        held = Run(tmp_path / "runs" / run["name"])
        assert (run["hash"], run["seed"]) == (held.config.digest(), held.config.seed)
        assert run["figures"]["average"] == held.summary()["average"]


def test_the_differences_of_rows_are_those_of_compare_and_say_whether_the_papers_order_holds(
    tmp_path: Path, table: Any
) -> None:
    path = table()
    values = yaml.safe_load(path.read_text())
    values["sweep"] = {"method": [{"name": "local"}, {"name": "fedvpt", "prompt_tokens": 2}]}
    values["published"]["rows"] = [
        {"title": "Alone", "where": {"method.name": "local"}, "average": [60, None]},
        {"title": "FedVPT", "where": {"method.name": "fedvpt"}, "average": [50, None]},
    ]
    values["published"]["columns"][0]["where"] = {"data.source": values["data"]["source"]}
    path.write_text(yaml.safe_dump(values))
    done = call(tmp_path, "reproduce", "mine.yaml", "--scale", "small", "--seed", "0,1")
    assert done.code == 0, done.words
    assert "1 pair of rows that the paper ranks: " in done.words
    (pair,) = stored(tmp_path)["pairs"]
    rows = call(tmp_path, "compare", *(f"runs/{name}" for name in runs_of(tmp_path)), "--against", "fedvpt", "--json")
    (paired,) = [row["against"] for row in json.loads(rows.words) if row.get("against")]
    assert (pair["row"], pair["against"]) == ("Alone", "FedVPT")
    assert [pair.get(name) for name in ("difference", "low", "high", "seeds")] == [
        paired[name] for name in ("difference", "low", "high", "seeds")
    ]


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one_and_what_is_left_is_said(tmp_path: Path, table: Any) -> None:
    table()
    command = ("reproduce", "mine.yaml", "--scale", "small")
    before = call(tmp_path, *command, "--left")
    assert "0 of 4 runs finished, time left unknown" in before.words
    assert not (tmp_path / "runs").exists()
    done = call(tmp_path, *command, "--jobs", "2")
    assert done.code == 0, done.words
    assert "4 runs, 4 of them were there, 0 failed" in done.words
    after = call(tmp_path, *command, "--left", "--jobs", "2")
    assert "4 of 4 runs finished, about 0:00:00 left" in after.words
    together = {name: content(run) for name, run in runs_of(tmp_path).items()}
    for run in runs_of(tmp_path).values():
        assert run.config.output.threads == 1
        shutil.rmtree(run.directory)
    assert call(tmp_path, *command).code == 0
    assert {name: content(run) for name, run in runs_of(tmp_path).items()} == together


def test_runs_that_the_command_run_made_are_kept(tmp_path: Path, table: Any) -> None:
    table()
    assert call(tmp_path, "run", "mine.yaml", "scale=small", "--quiet").code == 0
    before = {name: content(run) for name, run in runs_of(tmp_path).items()}
    times = {name: (run.directory / "run.db").stat().st_mtime_ns for name, run in runs_of(tmp_path).items()}
    done = call(tmp_path, "reproduce", "mine.yaml", "--scale", "small")
    assert done.code == 0, done.words
    assert "4 runs, 4 of them were there, 0 failed" in done.words
    assert {name: content(run) for name, run in runs_of(tmp_path).items()} == before
    assert {name: (run.directory / "run.db").stat().st_mtime_ns for name, run in runs_of(tmp_path).items()} == times


def test_a_grid_killed_in_the_middle_of_a_run_goes_on_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, table: Any
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    text = table(rounds=25).read_text()
    for folder in (whole, broken):
        (folder / "mine.yaml").write_text(text)
    arguments = ("reproduce", "mine.yaml", "--scale", "small", "--quiet")
    assert call(whole, *arguments).code == 0
    process = Started(broken, arguments)
    second = broken / "runs" / "mine-small-domains_per_client1-fedvpt-seed0"
    _wait_for_round(process, second, 3)
    process.kill()
    assert process.end().code == -signal.SIGKILL
    assert 3 <= Run(second).rounds()[-1].round < 25, "it must be killed in the middle"
    assert not (broken / "runs/results").exists()
    first = (broken / "runs/mine-small-domains_per_client1-head_tune-seed0/run.db").stat().st_mtime_ns
    done = call(broken, "reproduce", "mine.yaml", "--scale", "small")
    assert done.code == 0, done.words
    assert "resumed after round" in " ".join(done.words.split())
    assert (broken / "runs/mine-small-domains_per_client1-head_tune-seed0/run.db").stat().st_mtime_ns == first
    contents = [{name: content(run) for name, run in runs_of(folder).items()} for folder in (whole, broken)]
    assert contents[0] == contents[1]
    assert _figures(stored(whole)) == _figures(stored(broken))


def test_a_cell_that_breaks_is_stored_as_failed_and_the_others_are_made(tmp_path: Path, table: Any) -> None:
    path = table()
    values = yaml.safe_load(path.read_text())
    values["sweep"] = {
        "cases": [{"train.lr": 1e38, "method": "fedvpt"}, {"method": "head_tune"}, {"method": "local"}],
    }
    path.write_text(yaml.safe_dump(values))
    done = call(tmp_path, "reproduce", "mine.yaml", "--scale", "small")
    assert done.code == 8, done.words
    assert "FAILED: mine-small-fedvpt-seed0" in done.words
    assert "failed: 1 of 3 runs" in done.words
    status = {cell["row"]: cell["runs"][0] for cell in stored(tmp_path)["cells"] if "runs" in cell}
    assert {row: run["status"] for row, run in status.items()} == {
        "fedvpt": "failed",
        "Head-Tune": "finished",
        "local": "finished",
    }
    assert status["fedvpt"]["error"].startswith("DivergenceError: ")


def test_runs_of_another_config_in_the_way_are_told_before_anything_starts(tmp_path: Path, table: Any) -> None:
    table()
    last = "mine-small-domains_per_client2-fedvpt"
    other = ("method=fedvpt", "partition.domains_per_client=2", f"name={last.removesuffix('-fedvpt')}", "train.lr=0.5")
    assert call(tmp_path, "run", "mine.yaml", "scale=small", *other, "--quiet").code == 0
    done = call(tmp_path, "reproduce", "mine.yaml", "--scale", "small")
    assert done.code == 5, done.words
    assert "train.lr: 0.5 -> 0.05" in done.words
    assert list(runs_of(tmp_path)) == [f"{last}-seed0"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("mine.yaml", "--scale", "smal"), 2, "scale must be one of the config's scales (small), got 'smal'"),
        (("pfedmoap/tabel1",), 2, "did you mean 'pfedmoap/table1"),
        (("missing.yaml",), 2, "cannot read 'missing.yaml'"),
        ((), 2, "experiment must be given"),
        (("--what-holds", "page.md"), 5, "must hold result files, but there is none"),
        (("--page", "page.md"), 5, "must hold result files, but there is none"),
        (("mine.yaml", "--scale", "small", "published.paper=x"), 2, "published is not a known setting"),
    ],
)
def test_a_mistake_is_told_with_its_exit_code(
    tmp_path: Path, table: Any, arguments: tuple[str, ...], code: int, words: str
) -> None:
    table()
    done = call(tmp_path, "reproduce", *arguments)
    assert (done.code, words in " ".join(done.words.split())) == (code, True), done.words
    assert not (tmp_path / "runs").exists()


def test_every_paper_is_listed_and_a_page_is_written_of_what_is_stored(tmp_path: Path, table: Any) -> None:
    listed = call(tmp_path, "reproduce", "--list", "--json")
    assert [row["published"] for row in json.loads(listed.words) if row["name"] == "pfedbayespt/table1"] == ["yes"]
    table()
    arguments = (
        "reproduce",
        "mine.yaml",
        "--scale",
        "small",
        "--output",
        "kept",
        "--json",
        "--quiet",
        "method=head_tune",
    )
    done = call(tmp_path, *arguments)
    assert done.code == 0, done.words
    assert json.loads(done.words.partition("result file")[0])["experiment"] == "mine-small"
    assert call(tmp_path, "reproduce", "--page", "page.md", "--output", "kept").code == 0
    assert "## mine" in (tmp_path / "page.md").read_text()


def _wait_for_round(process: Started, directory: Path, round: int) -> None:
    for _ in range(6000):
        if (directory / "run.db").exists():
            records = Run(directory).rounds()
            if records and records[-1].round >= round:
                return
        assert process.running, "the grid must not end by itself"
        time.sleep(0.01)
    raise AssertionError(f"round {round} must come within a minute")


def _figures(result: dict[str, Any]) -> list[Any]:
    """The numbers of a result but for the time they took."""
    return [
        {key: value for key, value in run["figures"].items() if key != "seconds"}
        for cell in result["cells"]
        for run in cell.get("runs", [])
    ]
