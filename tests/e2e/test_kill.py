"""`kill -9` at random instants, again and again: the run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import content

from fedprompt.run import Run

pytestmark = pytest.mark.e2e

KILLS = 12


def test_a_run_killed_at_random_instants_ends_bit_identical(tmp_path: Path, settings: Any) -> None:
    rounds = 60
    values = settings(
        federation={"rounds": rounds, "fraction": 0.5, "evaluate_every": 3},
        method={"name": "fedvpt", "prompt_tokens": 4},
        variant={"name": "scaffold"},  # state on the server, on the clients and in uploads
        train={"epochs": 2, "momentum": 0.0},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    start = time.monotonic()
    assert _command(tmp_path, "whole").wait(timeout=300) == 0
    whole_time = time.monotonic() - start

    chance = random.Random(0)
    kills = 0
    interrupted_rounds = set()
    for _ in range(10 * KILLS):
        process = _command(tmp_path, "broken")
        try:
            # the first third of the time is imports; most kills should hit training, some the very beginning
            process.wait(timeout=chance.uniform(0.05, 1.0) * whole_time * 0.6)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
            kills += 1
            interrupted_rounds.add(_rounds_done(tmp_path))
            if kills >= KILLS:
                break
        else:
            assert process.returncode == 0
            break
    assert kills >= 10, f"only {kills} kills before the run was over"
    assert any(0 < round < rounds for round in interrupted_rounds), interrupted_rounds
    final = _command(tmp_path, "broken")
    assert final.wait(timeout=300) == 0
    runs = [Run(tmp_path / "runs" / f"{name}-fedvpt+scaffold-seed0") for name in ("whole", "broken")]
    assert [record.round for record in runs[1].rounds()] == list(range(rounds + 1))
    assert content(runs[0]) == content(runs[1])


def _command(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedprompt.cli", "run", "config.yaml", f"name={name}", "--resume", "--quiet"]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def _rounds_done(folder: Path) -> int:
    directory = folder / "runs" / "broken-fedvpt+scaffold-seed0"
    if not (directory / "run.db").exists():
        return -1
    records = Run(directory).rounds()
    return records[-1].round if records else -1
