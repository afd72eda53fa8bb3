"""`fedprompt tune` on two methods from beginning to end, killed once and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.e2e


def command(config: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "fedprompt.cli", "tune", str(config), "--trials", "4", *options]


def config_file(folder: Path, directory: str) -> Path:
    values: dict[str, Any] = {
        "name": "two",
        "data": {"source": "tiny", "train_per_cell": 8, "test_per_cell": 2},
        "partition": {"scheme": "domains", "clients": 4},
        "backbone": {"name": "tiny"},
        "train": {"lr": 0.05, "batch_size": 8},
        "federation": {"rounds": 6, "evaluate_last": 1},
        "output": {"directory": str(folder / directory), "cache": str(folder / "cache"), "threads": 1},
        "sweep": {"method": ["head_tune", "fedvpt"]},
        "tune": {"train.momentum": [0.0, 0.9]},
    }
    path = folder / f"{directory}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def finished_rounds(folder: Path) -> int:
    return sum(1 for _ in folder.glob("tune-two/*/trial-*/run.db"))


@pytest.mark.slow
def test_a_killed_study_is_resumed_and_comes_out_the_same(tmp_path: Path) -> None:
    def numbers(text: str) -> list[dict[str, Any]]:
        return [{key: row[key] for key in row if key not in ("seconds", "config")} for row in json.loads(text)]

    whole = subprocess.run(
        command(config_file(tmp_path, "whole"), "--json"), capture_output=True, text=True, check=True, timeout=500
    )
    path = config_file(tmp_path, "killed")
    process = subprocess.Popen(command(path, "--quiet"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while finished_rounds(tmp_path / "killed") < 3:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    refused = subprocess.run(command(path), capture_output=True, text=True, timeout=300)
    assert refused.returncode == 5
    assert "exists already; continue it with --resume" in refused.stderr
    again = subprocess.run(command(path, "--resume", "--json"), capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stderr
    assert numbers(again.stdout) == numbers(whole.stdout)
    for row in json.loads(again.stdout):
        assert (row["trials"], row["rounds"]) == (4, 4 * 2 + 2 * 4)
        assert Path(row["config"]).exists()
    assert (tmp_path / "killed/tune-two/tuning.html").exists()
