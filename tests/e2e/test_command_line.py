"""The command line as a person uses it: its own process, its exit codes, its words.

What an interpreter that has just started says or imports is asked of such ones, `fresh`; the other processes are warm ones.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from warm_processes import Call, Started, command_line

pytestmark = pytest.mark.e2e


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Run `fedprompt` in an empty folder with a cache of its own."""

    return command_line(tmp_path)


@pytest.fixture
def fresh(tmp_path: Path) -> Call:
    """The same in an interpreter that has imported nothing yet."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "FEDPROMPT_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"}
        command = [sys.executable, "-m", "fedprompt.cli", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300, check=False
        )

    return run


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['fedprompt', '--help']\n"
        "from fedprompt.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules), 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: fedprompt" in done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, fedprompt, fedprompt.config, fedprompt.runs.run, fedprompt.assets; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_run_compare_and_report(call: Call, fresh: Call, config: Any, tmp_path: Path) -> None:
    path = config(name="both", sweep={"method": ["head_tune", {"name": "fedvpt", "prompt_tokens": 2}]})
    done = fresh("run", path, "--seed", "0,1")
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stderr
    assert "head_tune" in done.stdout
    assert (tmp_path / "runs/both-fedvpt-seed1/run.db").is_file()

    rows = json.loads(call("compare", "runs", "--json").stdout)
    assert {row["label"] for row in rows} == {"head_tune", "fedvpt"}
    assert all(row["seeds"] == [0, 1] for row in rows)
    assert "| head_tune" in call("compare", "runs", "--format", "markdown").stdout
    assert len(call("compare", "runs", "--format", "csv").stdout.splitlines()) == 3

    done = call("report", "runs", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert "fedvpt" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/report.png").read_bytes().startswith(b"\x89PNG")


def test_json_output_is_json_and_nothing_else(call: Call, fresh: Call, config: Any) -> None:
    path = config(method={"name": "head_tune"})
    for arguments in (
        ["run", path, "--json"],
        ["validate", path, "--json"],
        ["methods", "--json"],
        ["backbones", "--json"],
        ["datasets", "--json"],
        ["partition", path, "--json"],
        ["doctor", "--json"],
        ["assets", "--json"],
    ):
        done = (fresh if arguments[0] == "run" else call)(*arguments)  # imports may print, too
        assert done.returncode == 0, (arguments, done.stderr)
        assert json.loads(done.stdout), arguments


def test_a_finished_run_is_not_overwritten(call: Call, config: Any, tmp_path: Path) -> None:
    path = config(method={"name": "head_tune"})
    assert call("run", path).returncode == 0
    before = (tmp_path / "runs/tiny-head_tune-seed0/run.db").read_bytes()
    done = call("run", path)
    assert done.returncode == 5
    assert "exists already; continue it with --resume" in done.stderr
    assert call("run", path, "--resume").returncode == 0
    assert (tmp_path / "runs/tiny-head_tune-seed0/run.db").read_bytes() == before


def test_resuming_with_another_config_is_refused_with_a_difference(call: Call, config: Any) -> None:
    path = config(method={"name": "head_tune"})
    call("run", path)
    done = call("run", path, "train.lr=0.5", "--resume")
    assert done.returncode == 5
    assert "train.lr: 0.05 -> 0.5" in done.stderr


def test_a_partition_is_saved_edited_and_given_back(call: Call, config: Any, tmp_path: Path) -> None:
    path = config(method={"name": "head_tune"})
    done = call("partition", path, "--show", "--save", "who.json")
    assert done.returncode == 0, done.stderr
    assert "4 clients" in done.stdout
    assert (tmp_path / "runs/partition-tiny.png").read_bytes().startswith(b"\x89PNG")
    text = json.loads((tmp_path / "who.json").read_text())
    dropped = text["clients"].pop()
    (tmp_path / "who.json").write_text(json.dumps(text))
    done = call(
        "run", path, "partition.scheme=manifest", "partition.manifest=who.json", "partition.clients=3", "--json"
    )
    assert done.returncode == 0, done.stderr
    listed = call(
        "partition", path, "partition.scheme=manifest", "partition.manifest=who.json", "partition.clients=3", "--json"
    )
    names = [client["client"] for client in json.loads(listed.stdout)["clients"]]
    assert len(names) == 3
    assert dropped["name"] not in names


def test_the_images_of_every_client_are_written_once_for_all_methods_of_a_config(
    call: Call, complaint: Any, config: Any, tmp_path: Path
) -> None:
    done = call("federate", "split", config(sweep={"method": ["head_tune", "fedvpt"]}), "--output", "files")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [f"client_{i}.parquet" for i in range(4)]
    for sweep in ({"seed": [0, 1]}, {"partition.clients": [2, 4]}, {"data.train_per_cell": [2, 4]}):
        code, said = complaint("federate", "split", config(sweep=sweep), "--output", "others")
        assert (code, "must divide one set of images in one way" in said) == (2, True), said


def test_validate_prints_a_hash_for_each_run(call: Call, config: Any) -> None:
    done = call("validate", config(sweep={"seed": [0, 1]}))
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["federation.fraction=1.5"], 2, "federation.fraction must be less than or equal to 1, got 1.5"),
        (["federation.rounds=two"], 2, "federation.rounds must be a valid integer, got 'two'"),
        (["train.colour=red"], 2, "train.colour is not a known setting"),
        (["method=fedvtp"], 2, "method.name must be one of"),
        (["method.head='False'"], 2, "method.head must be 'local', 'shared' or 'shared_then_finetune', got 'False'"),
        (["method.prompt_tokens=true"], 2, "method.prompt_tokens must be a valid integer, got True"),
        (["variant=fedproks"], 2, "variant.name must be one of"),
        (["variant.mu=0.1"], 2, "variant must have a name"),
        (["--seed", "minus"], 2, "--seed must be a whole number of at least 0, got 'minus'"),
        (["data.source=nowhere"], 3, "data.source must"),
        (["partition.clients=1000"], 2, "partition.clients must be at most the 80 training images, got 1000"),
        (["partition.domains_per_client=9"], 2, "partition.domains_per_client must"),
        (["partition.scheme=manifest"], 2, "partition.manifest must"),
        (["partition.scheme=manifest", "partition.manifest=nowhere.json"], 3, "nowhere.json"),
        (["backbone.name=nowhere.safetensors"], 4, "nowhere.safetensors"),
        (["backbone.image_size=17"], 4, "backbone.image_size must"),
        (["method.depth=99"], 2, "method.depth must be at most the 3 blocks"),
        (["output.directory=/proc/nowhere"], 7, "output.directory must be writable"),
        (["train.lr=1e30"], 8, "must be finite"),
    ],
)
def test_bad_input_is_told_by_field_rule_and_value(
    complaint: Any, config: Any, arguments: list[str], code: int, message: str
) -> None:
    ended, said = complaint("run", config(), *arguments)
    assert message in said, said
    assert ended == code


def test_an_error_is_one_line_without_a_traceback(fresh: Call, config: Any) -> None:
    done = fresh("run", config(), "federation.fraction=1.5")
    assert done.stderr == "error: federation.fraction must be less than or equal to 1, got 1.5\n"
    assert done.returncode == 2


def test_seed_zero_runs_as_seed_zero(call: Call, config: Any, tmp_path: Path) -> None:
    assert call("run", config(method={"name": "head_tune"}, seed=7), "--seed", "0").returncode == 0
    assert (tmp_path / "runs/tiny-head_tune-seed0").is_dir()


def test_one_client_is_a_federation(call: Call, config: Any) -> None:
    done = call("run", config(method={"name": "fedvpt"}, partition={"scheme": "iid", "clients": 1}), "--json")
    assert done.returncode == 0, done.stderr


def test_a_mistake_in_the_last_run_of_a_sweep_shows_before_the_first_one_starts(
    call: Call, config: Any, tmp_path: Path
) -> None:
    done = call("run", config(sweep={"method": ["head_tune", {"name": "fedvpt", "head": "nobody's"}]}))
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_fills_up_leaves_the_finished_rounds(call: Call, config: Any, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    path = config(
        method={"name": "fedvpt", "prompt_tokens": 200},
        federation={"rounds": 200, "evaluate_every": 100, "evaluate_last": 0},
    )
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (300_000, 300_000))
    cache = str(tmp_path / "cache")
    done = Started(tmp_path, ("run", path, "--quiet"), plant=limit, FEDPROMPT_CACHE=cache).end()
    assert done.code == 7, done.words
    assert "output.directory must be writable and have room" in done.words
    rows = json.loads(call("compare", "runs", "--json").stdout)
    assert 1 <= rows[0]["rounds"] < 200


def test_an_interrupted_run_says_how_to_go_on(config: Any, tmp_path: Path) -> None:
    path = config(method={"name": "fedvpt", "prompt_tokens": 2}, federation={"rounds": 2000, "evaluate_every": 500})
    environment = {**os.environ, "FEDPROMPT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-u", "-m", "fedprompt.cli", "run", path]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "round 3/2000" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert "Continue with --resume" in rest
    assert "Traceback" not in rest
