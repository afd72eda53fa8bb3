"""The protocols as a person runs them: each result is a run like any other, and each mistake is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from warm_processes import Call, command_line

from fedprompt.runs.run import Run

pytestmark = pytest.mark.e2e


@pytest.fixture
def call(tmp_path: Path, settings: Any) -> Call:
    """Run `fedprompt` in a folder that holds `tiny.yaml`, with a cache of its own."""
    values = settings(method={"name": "fedvpt", "prompt_tokens": 2})
    values["output"] = {"threads": 1}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))

    return command_line(tmp_path)


def labels(text: str) -> list[str]:
    return [row["label"] for row in json.loads(text)]


def test_new_clients_are_runs_that_compare_and_report_understand(call: Call, tmp_path: Path) -> None:
    command = ("protocol", "new-clients", "tiny.yaml", "--share", "0.5", "--epochs", "2", "--seed", "0,1")
    done = call(*command)
    assert done.returncode == 0, done.stderr
    assert "Only clients held out of training are evaluated: all rows" in done.stdout
    assert "round 2/2" in done.stderr
    run = Run(tmp_path / "runs/tiny-new-clients-fedvpt-seed1")
    assert (len(run.clients), len(run.client_accuracies())) == (4, 2)

    done = call(*command)
    assert done.returncode == 5
    assert "continue it with --resume" in done.stderr
    done = call(*command, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["seeds"] == [0, 1]

    assert call("run", "tiny.yaml", "--quiet").returncode == 0
    done = call("compare", "runs")
    assert "held out 0.0" in done.stdout  # the heading of a table of its own
    assert "held out 0.5" in done.stdout
    rows = json.loads(call("compare", "runs", "--json").stdout)
    assert [row["label"] for row in rows] == ["fedvpt", "fedvpt"]
    assert "held out 0.0" in rows[0]["task"]
    assert "held out 0.5" in rows[1]["task"]
    done = call("report", "runs", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert "4; only the 2 held out of training are evaluated" in (tmp_path / "out/report.html").read_text()


def test_a_sweep_draws_its_picture_and_can_be_extended(call: Call, tmp_path: Path) -> None:
    done = call("protocol", "sweep", "method.prompt_tokens=1..2", "tiny.yaml", "federation.rounds=1", "--quiet")
    assert done.returncode == 0, done.stderr
    assert "picture: runs/sweep-tiny-method.prompt_tokens.png" in done.stderr
    picture = tmp_path / "runs/sweep-tiny-method.prompt_tokens.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "runs/tiny-prompt_tokens1-fedvpt-seed0/run.db").read_bytes()

    done = call(
        "protocol", "sweep", "method.prompt_tokens=1..3", "tiny.yaml", "federation.rounds=1", "--resume", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout) == [f"fedvpt prompt_tokens={count}" for count in (1, 2, 3)]
    assert (tmp_path / "runs/tiny-prompt_tokens1-fedvpt-seed0/run.db").read_bytes() == first
    assert sorted(labels(call("compare", "runs", "--json").stdout)) == labels(done.stdout)


def test_an_ablation_compares_the_three_forms(call: Call) -> None:
    overrides = ("method=pfedbayespt", "method.prompt_tokens=2", "method.predict_draws=2", "federation.rounds=1")
    done = call("protocol", "ablation", "tiny.yaml", *overrides, "--json")
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout) == ["pfedbayespt_d", "pfedbayespt_g", "pfedbayespt"]


def test_heterogeneity_compares_separated_with_mixed_clients(call: Call, tmp_path: Path) -> None:
    done = call("protocol", "heterogeneity", "tiny.yaml", "method=head_tune", "federation.rounds=1")
    assert done.returncode == 0, done.stderr
    assert "subsets per client 1" in done.stdout  # a table for every task
    assert "subsets per client 2" in done.stdout
    for count in (1, 2):
        run = Run(tmp_path / f"runs/tiny-subsets_per_client{count}-head_tune-seed0")
        assert run.config.partition.scheme == "label_subsets"
        assert run.finished


DUAL = ("backbone.name=tiny-clip", "method=promptfl", "method.context_tokens=2")


@pytest.mark.slow
def test_base_to_novel_adds_columns_to_the_comparison(call: Call, tmp_path: Path) -> None:
    command = ("protocol", "base-to-novel", "tiny.yaml", *DUAL, "--share", "0.4")
    done = call(*command)
    assert done.returncode == 0, done.stderr
    assert all(title in done.stdout for title in ("Local", "Base", "Novel", "HM"))
    assert "label check: zero-shot" in done.stderr
    assert "WARNING: zero-shot accuracy" in done.stderr  # the tiny backbone knows nothing
    run = Run(tmp_path / "runs/tiny-base-to-novel-promptfl-seed0")
    assert run.reader.fact("classes") == ["disc", "square", "triangle"]

    again = call(*command, "--resume", "--json")
    assert again.returncode == 0, again.stderr
    (row,) = json.loads(again.stdout)
    assert 0 <= row["hm"]["mean"] <= 1
    assert "WARNING: tiny-base-to-novel-promptfl-seed0: zero-shot accuracy" in again.stderr
    assert "| Novel |" in call("compare", "runs", "--format", "markdown").stdout
    assert call("report", "runs", "--output", "out").returncode == 0
    assert ">Novel<" in (tmp_path / "out/report.html").read_text()


@pytest.mark.slow
def test_a_comeback_follows_the_client_with_and_without_its_absence(call: Call, tmp_path: Path) -> None:
    command = ("protocol", "comeback", "tiny.yaml", *DUAL, "federation.rounds=4", "--client", "1", "--rounds", "2")
    done = call(*command)
    assert done.returncode == 0, done.stderr
    assert "accuracy of client_1 in per cent, away in rounds 2 to 3" in done.stdout
    table = done.stdout[done.stdout.index("accuracy of client_1") :].splitlines()
    assert table[1].split("  ") == ["round", "promptfl present", "promptfl away"]
    assert [line.endswith("away") for line in table[2:6]] == [False, True, True, False]
    assert (tmp_path / "runs/comeback-tiny-client_1.png").read_bytes().startswith(b"\x89PNG")
    run = Run(tmp_path / "runs/tiny-comeback-away2to3-promptfl-seed0")
    assert [record.cohort for record in run.rounds()[1:]] == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    as_json = call(*command, "--resume", "--json")
    assert as_json.returncode == 0, as_json.stderr
    assert len(json.loads(as_json.stdout)) == 2


def test_the_commands_are_listed_and_need_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['fedprompt', 'protocol', '--help']\n"
        "from fedprompt.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules), 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("new-clients", "base-to-novel", "comeback", "sweep", "ablation", "heterogeneity"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["new-clients", "tiny.yaml", "--share", "1"], 2, "--share must be greater than 0 and less than 1, got 1.0"),
        (
            ["new-clients", "tiny.yaml", "partition.scheme=iid", "partition.clients=1"],
            2,
            "federation.held_out must be 0 where there is only one client, got 0.5",
        ),
        (["new-clients", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["base-to-novel", "tiny.yaml", "--share", "0"], 2, "--share must be greater than 0 and less than 1, got 0.0"),
        (["base-to-novel", "tiny.yaml"], 2, "data.novel must be 0 for fedvpt, which knows only the classes"),
        (
            ["base-to-novel", "tiny.yaml", *DUAL, "method.class_specific=true"],
            2,
            "data.novel must be 0 for promptfl with these settings: the size of context follows the number of classes",
        ),
        (
            ["base-to-novel", "tiny.yaml", *DUAL, "--share", "0.1"],
            2,
            "data.novel must be at least one of the 5 classes",
        ),
        (["comeback", "tiny.yaml"], 2, "--rounds must be at least 1 and leave a round before and after the absence"),
        (["comeback", "tiny.yaml", "--rounds", "1", "federation.rounds=3", "--client", "x"], 2, "--client must be a"),
        (["sweep", "method.V=1..10", "tiny.yaml"], 2, "method.predict_draws is not a setting of fedvpt; it has"),
        (["sweep", "method.prompt_tokens=1..", "tiny.yaml"], 2, "must have a whole number at both ends of a range"),
        (["sweep", "tiny.yaml", "method.prompt_tokens=1..2"], 2, "sweep must look like field=values, got 'tiny.yaml'"),
        (["ablation", "tiny.yaml", "method.colour=red"], 2, "method.colour is not a setting of fedvpt"),
        (["heterogeneity", "tiny.yaml", "partition.subsets=1"], 2, "partition.subsets_per_client must be at most"),
    ],
)
def test_bad_input_is_told_by_field_rule_and_value(
    complaint: Any, call: Call, arguments: list[str], code: int, message: str
) -> None:
    ended, said = complaint("protocol", *arguments)
    assert message in said, said
    assert ended == code


def test_a_mistake_in_the_last_value_shows_before_the_first_run_starts(call: Call, tmp_path: Path) -> None:
    done = call("protocol", "sweep", "method.prompt_tokens=2,-1", "tiny.yaml")
    assert "method.prompt_tokens must be greater than or equal to 0, got -1" in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()


def test_cross_domain_leaves_every_domain_out_once(call: Call, tmp_path: Path) -> None:
    done = call("protocol", "cross-domain", "tiny.yaml", "partition.clients=3")
    assert done.returncode == 0, done.stderr
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(runs) == 4
    for path in runs:
        run = Run(tmp_path / "runs" / path)
        unseen = run.config.data.unseen_domain
        assert unseen is not None
        assert unseen in path
        for result in run.reader.evaluations(2).values():
            assert list(result["domains"]) == [unseen]
    chosen = call("protocol", "cross-domain", "tiny.yaml", "partition.clients=3", "--domain", "outline", "name=one")
    assert chosen.returncode == 0, chosen.stderr
    assert len(list((tmp_path / "runs").glob("one-*"))) == 1


def test_cross_domain_needs_several_domains(call: Call) -> None:
    done = call("protocol", "cross-domain", "tiny.yaml", "--domain", "outlin")
    assert done.returncode == 3
    assert "did you mean 'outline'" in done.stderr


def test_cross_dataset_tests_the_names_of_another_set(call: Call, tmp_path: Path) -> None:
    done = call("protocol", "cross-dataset", "tiny.yaml", "--to", "tiny", "method=promptfl", "backbone=tiny-clip")
    assert done.returncode == 0, done.stderr
    assert "Novel" in done.stdout
    refused = call("protocol", "cross-dataset", "tiny.yaml")
    assert refused.returncode == 2
    assert "--to must name another set" in refused.stderr
