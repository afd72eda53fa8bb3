"""Who writes a run, found out without touching its lock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from dashboard_support import begin, commit, listed, write

from fedprompt.dashboard.liveness import LOCKS, RECENT, Locks, Signs, status
from fedprompt.dashboard.views import Views

pytestmark = pytest.mark.unit

tells_locks = pytest.mark.skipif(not LOCKS.exists(), reason="needs /proc/locks, which only Linux has")
QUIET = {"damaged": False, "complete": False, "writer": False, "grown": None, "quiet": 1e6, "pace": 0.0}


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ({}, ("stopped", "lock")),
        ({"writer": True}, ("running", "lock")),
        (
            {"writer": True, "complete": True},
            ("running", "lock"),
        ),  # the test on novel classes comes after the last round
        ({"writer": True, "damaged": True}, ("damaged", "file")),
        ({"complete": True, "quiet": 0.0, "writer": None}, ("finished", "rounds")),
        ({"quiet": 0.0}, ("stopped", "lock")),  # a lock that is free outweighs a fresh file
        ({"quiet": 0.0, "writer": None}, ("running", "age")),
        ({"quiet": RECENT + 1, "writer": None}, ("stopped", "age")),
        ({"quiet": RECENT + 1, "writer": None, "pace": RECENT}, ("running", "age")),  # its rounds take long
        ({"grown": 1.0}, ("running", "growth")),
        ({"grown": RECENT + 1}, ("stopped", "lock")),
    ],
)
def test_the_status_follows_from_the_signs(signs: dict[str, Any], expected: tuple[str, str]) -> None:
    assert status(Signs(**{**QUIET, **signs})) == expected


def test_only_exclusive_locks_of_whole_files_count() -> None:
    text = (
        "1: FLOCK  ADVISORY  WRITE 12 fe:00:2146410 0 EOF\n"
        "2: FLOCK  ADVISORY  READ 12 fe:00:77 0 EOF\n"
        "3: POSIX  ADVISORY  WRITE 12 fe:00:78 128 128\n"
        "3: -> FLOCK  ADVISORY  WRITE 13 fe:00:79 0 EOF\n"  # waits for another one
    )
    assert Locks.parse(text).held == {(0xFE, 0, 2146410)}


def test_a_lock_under_another_device_number_leaves_it_open(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    inode = os.stat(tmp_path / "run.lock").st_ino
    assert Locks(frozenset({(1234, 56, inode)})).writer_of(tmp_path) is None
    assert Locks(frozenset()).writer_of(tmp_path) is False
    assert Locks(None).writer_of(tmp_path) is None


@tells_locks
def test_a_run_is_running_as_long_as_its_writer_lives(tmp_path: Path, views: Views) -> None:
    store = begin(tmp_path / "run", rounds=5)
    commit(store, 1, [5, 6, 7])
    assert (listed(views)["run"]["status"], listed(views)["run"]["by"]) == ("running", "lock")
    store.close()
    assert listed(views)["run"]["status"] == "stopped"


@tells_locks
def test_looking_never_takes_the_lock(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[5]], rounds=3)
    before = Locks.now().held
    listed(views)
    views.run({"id": listed(views)["run"]["id"]})
    assert Locks.now().writer_of(tmp_path / "run") is False
    assert before is not None
    begin(tmp_path / "other").close()  # a writer that starts meanwhile is let in


def test_a_run_with_all_rounds_is_finished(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[5, 6], [7, 8]])
    assert listed(views)["run"]["status"] == "finished"
