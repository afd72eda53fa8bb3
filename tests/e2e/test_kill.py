"""`kill -9` at random instants, again and again: the run ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import content
from warm_processes import Started

from fedprompt.errors import FedpromptError
from fedprompt.runs.run import Run

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("kills", "rounds"), [(5, 100), pytest.param(30, 220, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_a_run_killed_at_random_instants_ends_bit_identical(
    tmp_path: Path, settings: Any, kills: int, rounds: int
) -> None:
    values = settings(
        federation={"rounds": rounds, "fraction": 0.5, "evaluate_every": 3},
        method={"name": "fedvpt", "prompt_tokens": 4},
        variant={"name": "scaffold"},  # state on the server, on the clients and in uploads
        train={"epochs": 2, "momentum": 0.0},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert _command(tmp_path, "whole").end().code == 0

    chance = random.Random(0)
    interrupted_rounds = set()
    for number in range(kills):
        cache = chance.choice(["cache", f"cache-{number}"])  # a new one is filled while the round is trained
        before = _rounds_done(tmp_path)
        process = _command(tmp_path, "broken", cache)
        _wait_for(process, tmp_path, before + chance.randint(0, 4))  # at most four rounds a kill
        time.sleep(chance.uniform(0, 0.05))
        assert process.running, "the run must not be over before it was killed often enough"
        process.kill()
        assert process.end().code == -signal.SIGKILL
        assert _rounds_done(tmp_path) >= before
        interrupted_rounds.add(_rounds_done(tmp_path))
    assert any(0 < round < rounds for round in interrupted_rounds), interrupted_rounds
    assert _command(tmp_path, "broken").end().code == 0
    runs = [Run(tmp_path / "runs" / f"{name}-fedvpt+scaffold-seed0") for name in ("whole", "broken")]
    assert [record.round for record in runs[1].rounds()] == list(range(rounds + 1))
    assert content(runs[0]) == content(runs[1])


def _command(folder: Path, name: str, cache: str = "cache") -> Started:
    return Started(folder, ("run", "config.yaml", f"name={name}", f"output.cache={cache}", "--resume", "--quiet"))


def _wait_for(process: Started, folder: Path, round: int) -> None:
    """Until that round is committed; with the round that was there before, at once: while the process still begins."""
    for _ in range(15_000):
        if _rounds_done(folder) >= round:
            return
        assert process.running, "the run must not end by itself"
        time.sleep(0.02)
    raise AssertionError(f"round {round} must come within five minutes")


def _rounds_done(folder: Path) -> int:
    directory = folder / "runs" / "broken-fedvpt+scaffold-seed0"
    if not (directory / "run.db").exists():
        return -1
    try:
        run = Run(directory)
    except FedpromptError:  # the file is being made
        return -1
    try:
        records = run.rounds()
    finally:
        run.close()
    return records[-1].round if records else -1
