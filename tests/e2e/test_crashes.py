"""The crash matrix: kills, full disks, wrong clocks, company and broken places. A run goes on bit-identical, or says why it cannot.

`test_kill.py` kills at random instants from outside. Here death is placed: at a given step within a given part of a run, or
by the kernel in the middle of a write.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import faults
import pytest
from conftest import ROOT
from faults import Moment
from support import content
from warm_processes import Ended, Plant, Started, call

from fedprompt.errors import StorageError
from fedprompt.io.files import write_atomically
from fedprompt.runs.run import Run
from fedprompt.runs.store import RoundRecord

pytestmark = pytest.mark.e2e

ROUNDS = 4
CONFIG = f"""
name: tiny
data: {{source: tiny, train_per_cell: 4, test_per_cell: 2}}
partition: {{scheme: domains, clients: 4}}
backbone: {{name: tiny}}
method: {{name: fedvpt, prompt_tokens: 2}}
variant: {{name: scaffold}}  # state on the server, on the clients and in uploads
train: {{lr: 0.05, batch_size: 8, momentum: 0.0}}
federation: {{rounds: {ROUNDS}, fraction: 0.5, evaluate_every: 2}}
output: {{directory: runs, cache: cache, threads: 1}}
"""
DIRECTORY = "runs/tiny-fedvpt+scaffold-seed0"
RUN = ("run", "config.yaml", "--resume", "--quiet")
PHASES = ("start-up", "creation", "cache write", "train", "aggregate", "evaluate", "commit", "transaction")


class Undisturbed(NamedTuple):
    """A run that nothing happened to, and when its parts took place."""

    folder: Path
    content: str
    moments: list[Moment]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "config.yaml").write_text(CONFIG)
    ended = call(folder, *RUN, plant=partial(faults.count_steps, folder / "steps"))
    assert ended.code == 0, ended.words
    moments = [Moment(*each) for each in json.loads((folder / "steps").read_text())]
    return Undisturbed(folder, _content(folder), moments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def warm_folder(folder: Path, undisturbed: Undisturbed) -> Path:
    """A folder whose cache is full already, so that a limit on files meets the run file alone."""
    shutil.copytree(undisturbed.folder / "cache", folder / "cache")
    return folder


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_within_each_part_of_a_run(folder: Path, undisturbed: Undisturbed, phase: str) -> None:
    _kill_within(folder, undisturbed, phase, random.Random(phase))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(5))
def test_forty_more_random_kills(folder: Path, undisturbed: Undisturbed, phase: str, seed: int) -> None:
    _kill_within(folder, undisturbed, phase, random.Random(f"{phase} {seed}"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_kill_at_every_third_step_of_a_transaction(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """From before BEGIN until after COMMIT: all of the round is there or nothing, and nothing else is ever lost."""
    transactions = [moment for moment in undisturbed.moments if moment.phase == "transaction"]
    moment = transactions[2]  # of round 2, which is evaluated
    found = set()
    for step in range(moment.first, moment.last + 1, 3):
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG)
        kept = _survive(folder, undisturbed, partial(faults.kill_at, moment, step, folder / "where"))
        found.add(kept[-1].round)
        shutil.rmtree(folder)
    assert found == {1, 2}


def _kill_within(folder: Path, undisturbed: Undisturbed, phase: str, chance: random.Random) -> None:
    moment = chance.choice([each for each in undisturbed.moments if each.phase == phase])
    step = chance.randint(moment.first + 1, moment.last)
    _survive(folder, undisturbed, partial(faults.kill_at, moment, step, folder / "where"))
    assert phase in json.loads((folder / "where").read_text())


@pytest.mark.parametrize(
    ("room", "round", "checkpoint"),
    [(20_000, None, False), (0, 0, False), (100, 1, False), (7_000, 4, False), (0, 3, True), (5_000, 4, True)],
)
def test_death_in_the_middle_of_a_write(
    warm_folder: Path, undisturbed: Undisturbed, room: int, round: int | None, checkpoint: bool
) -> None:
    """The kernel ends a process whose file outgrows a limit, half of the write done: of a new file, the log, a checkpoint."""
    plant = partial(faults.little_room, room, round, deadly=True, checkpoint=checkpoint)
    kept = _survive(warm_folder, undisturbed, plant, -signal.SIGXFSZ)
    assert len(kept) == (round or 0) + checkpoint  # a checkpoint follows the commit


def _survive(folder: Path, undisturbed: Undisturbed, plant: Plant, code: int = -signal.SIGKILL) -> list[RoundRecord]:
    """Let a fault strike, resume, and compare; returns what was committed before it struck."""
    ended = call(folder, *RUN, plant=plant)
    assert ended.code == code, ended.words
    return _resume(folder, undisturbed)


def _resume(folder: Path, undisturbed: Undisturbed) -> list[RoundRecord]:
    kept = _rounds(folder)
    assert len(kept) <= ROUNDS + 1
    ended = call(folder, *RUN)
    assert ended.code == 0, ended.words
    assert _rounds(folder)[: len(kept)] == kept  # with the seconds they took: they were not computed again
    assert _content(folder) == undisturbed.content
    return kept


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "round"), [(20_000, None), (4_000, 0), (100, 1), (7_000, 4)])
def test_a_disk_without_room_for_the_run_file(
    warm_folder: Path, undisturbed: Undisturbed, room: int, round: int | None
) -> None:
    ended = call(warm_folder, *RUN, plant=partial(faults.little_room, room, round))
    assert _told(ended, 7, "output.directory must be writable and have room")
    assert len(_resume(warm_folder, undisturbed)) == (round or 0)


def test_a_disk_that_is_full_in_the_middle_of_a_run(folder: Path, small_disk: Path, undisturbed: Undisturbed) -> None:
    (folder / "runs").symlink_to(small_disk)
    filling = [small_disk / "something", small_disk / "something else"]
    first = Started(folder, RUN, partial(faults.wait_after_round, 1, folder / "here", folder / "go"))
    faults.wait_for(folder / "here")
    _fill(filling[0])
    (folder / "go").touch()
    assert _told(first.end(), 7, "output.directory must be writable and have room")
    assert [record.round for record in _rounds(folder)] == [0, 1]
    _fill(filling[1])  # what SQLite gave back when it closed the file
    assert _told(call(folder, *RUN), 7, "output.directory must be writable and have room")
    for each in filling:
        each.unlink()
    assert [record.round for record in _resume(folder, undisturbed)] == [0, 1]


@pytest.mark.parametrize("room", [0, 4096, 100_000])
def test_a_full_disk_under_the_image_cache_costs_time_only(
    folder: Path, small_disk: Path, undisturbed: Undisturbed, room: int
) -> None:
    (folder / "cache").symlink_to(small_disk)
    _fill(small_disk / "something else", room)
    ended = call(folder, *RUN)
    assert ended.code == 0, ended.words
    assert "decoded images stay in memory" in ended.words
    assert _content(folder) == undisturbed.content


def test_a_full_disk_under_the_report(folder: Path, small_disk: Path, undisturbed: Undisturbed) -> None:
    page = small_disk / "out" / "report.html"
    write_atomically(page, b"the report of yesterday")
    _fill(small_disk / "something else")
    ended = call(undisturbed.folder, "report", DIRECTORY, "--output", str(page.parent))
    assert _told(ended, 7, "cannot write")
    assert page.read_bytes() == b"the report of yesterday"
    assert os.listdir(page.parent) == [page.name]


def test_death_while_the_report_is_written(folder: Path, undisturbed: Undisturbed) -> None:
    page = folder / "out" / "report.html"
    write_atomically(page, b"the report of yesterday")
    command = ("report", DIRECTORY, "--output", str(page.parent))
    ended = call(undisturbed.folder, *command, plant=partial(faults.little_room, 20_000, None, deadly=True))
    assert ended.code == -signal.SIGXFSZ, ended.words
    assert page.read_bytes() == b"the report of yesterday"
    assert call(undisturbed.folder, *command).code == 0
    assert page.read_text().rstrip().endswith("</html>")


def test_a_full_disk_under_an_asset_leaves_no_half(small_disk: Path) -> None:
    asset = small_disk / "weights" / "some.safetensors"
    with pytest.raises(StorageError, match="No space left on device"):
        write_atomically(asset, bytes(1_000_000))
    assert os.listdir(asset.parent) == []
    write_atomically(asset, bytes(1_000))
    assert asset.read_bytes() == bytes(1_000)


def _fill(path: Path, room: int = 0) -> None:
    """Take all that is left of a disk but `room` bytes."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        for _ in range(1_000):
            file.write(bytes(4096))
    assert shutil.disk_usage(path).free == 0
    os.truncate(path, path.stat().st_size - room)


# -- clocks -----------------------------------------------------------------------------------------------------------


def test_a_clock_that_leaps_by_years_changes_nothing(folder: Path, undisturbed: Undisturbed) -> None:
    ended = call(folder, *RUN, plant=faults.jumping_clock)
    assert ended.code == 0, ended.words
    assert _content(folder) == undisturbed.content
    assert all(0 <= seconds < faults.LONGEST for record in _rounds(folder) for seconds in record.seconds.values())


def test_nothing_that_trains_looks_at_the_time_of_day() -> None:
    """Durations come from `perf_counter`, which cannot leap; a file's time is compared for equality, or tells which file of
    a full cache goes first. Only what stands beside a run has dates: certificates, results, trackers, lines of the log,
    notices, and pages that tell ages.
    """
    words = ("time.time", "datetime", "localtime", "gmtime", "CURRENT_TIME", "strftime", "mtime", "ctime")
    source = ROOT / "src" / "fedprompt"
    allowed = {
        "backbones/weight_cache.py": {"mtime", "ctime"},
        "data/cache/fingerprint.py": {"mtime", "ctime"},
        "features/feature_rows.py": {"mtime"},
        "deploy/certificates.py": {"datetime"},
        "deploy/check_site.py": {"datetime"},
        "deploy/expiry.py": {"datetime"},
        "deploy/webhook.py": {"datetime"},
        "deploy/watch_server.py": {"datetime"},
        "deploy/federation_state.py": {"mtime"},
        "deploy/federation_page.py": {"time.time"},
        "io/log_lines.py": {"datetime"},
        "papers/collect.py": {"datetime"},
        "dashboard/follower.py": {"time.time", "mtime"},
        "dashboard/views.py": {"time.time"},
        "experiment/trackers.py": {"time.time"},
    }
    for path in source.rglob("*.py"):
        used = {word for word in words if word in path.read_text()}
        name = path.relative_to(source).as_posix()
        assert used <= allowed.get(name, set()), f"{name} uses {used}"


# -- company ----------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_readers_are_welcome(folder: Path, undisturbed: Undisturbed) -> None:
    first = Started(folder, RUN, partial(faults.wait_after_round, 2, folder / "here", folder / "go"))
    faults.wait_for(folder / "here")
    assert _told(call(folder, *RUN), 5, "is being written by another process")
    readers = [Started(folder, ("compare", "runs", "--json")) for _ in range(2)]
    for reader in readers:
        ended = reader.end()
        assert ended.code == 0, ended.words
        assert json.loads(ended.words)[0]["rounds"] == 2
    (folder / "go").touch()
    assert first.end().code == 0
    assert _content(folder) == undisturbed.content


def test_two_processes_fill_one_cache_at_once(folder: Path, undisturbed: Undisturbed) -> None:
    both = [Started(folder, (*RUN, f"output.directory={name}")) for name in ("one", "two")]
    for process in both:
        ended = process.end()
        assert ended.code == 0, ended.words
    for name in ("one", "two"):
        os.replace(folder / name, folder / "runs")
        assert _content(folder) == undisturbed.content
        shutil.rmtree(folder / "runs")
    pixels = [
        [path.read_bytes() for path in sorted((each / "cache/pixels").glob("*.rgb"))]
        for each in (folder, undisturbed.folder)
    ]
    assert pixels[0] == pixels[1]


# -- broken places ----------------------------------------------------------------------------------------------------


def test_a_read_only_disk(folder: Path, small_disk: Path, undisturbed: Undisturbed) -> None:
    shutil.copytree(undisturbed.folder / "runs", small_disk / "runs", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    (folder / "runs").symlink_to(small_disk / "runs")
    assert call(folder, "compare", "runs").code == 0
    assert _told(call(folder, *RUN, "name=new"), 7, "output.directory must be writable")
    assert _told(call(folder, *RUN), 7, "output.directory must be writable")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_file_taken_away_while_the_run_is_on(folder: Path, replaced: bool) -> None:
    """The process holds the file open and could write to it for days: nobody would ever see those rounds."""
    process = Started(folder, RUN, partial(faults.wait_after_round, 1, folder / "here", folder / "go"))
    faults.wait_for(folder / "here")
    shutil.rmtree(folder / DIRECTORY)
    if replaced:
        (folder / DIRECTORY).mkdir()
        (folder / DIRECTORY / "run.db").touch()
    (folder / "go").touch()
    assert _told(process.end(), 7, "was moved, removed or replaced while the run was on")


def test_a_run_file_emptied_while_the_run_is_on(folder: Path) -> None:
    process = Started(folder, RUN, partial(faults.wait_after_round, 1, folder / "here", folder / "go"))
    faults.wait_for(folder / "here")
    for name in ("run.db", "run.db-wal"):
        os.truncate(folder / DIRECTORY / name, 0)
    (folder / "go").touch()
    assert _told(process.end(), 5, "run.db")


def test_an_empty_run_file_is_told_and_kept(folder: Path, undisturbed: Undisturbed) -> None:
    shutil.copytree(undisturbed.folder / "runs", folder / "runs")
    path = folder / DIRECTORY / "run.db"
    path.write_bytes(b"")
    assert _told(call(folder, *RUN), 5, "run.db")
    assert path.read_bytes() == b""


def test_the_log_of_a_deleted_run_file_does_not_haunt_the_next_one(folder: Path, undisturbed: Undisturbed) -> None:
    """SQLite would take the log of the old file for that of the new one, and mix the rounds of two runs."""
    moment = next(each for each in undisturbed.moments[::-1] if each.phase == "train")
    assert (
        call(folder, *RUN, plant=partial(faults.kill_at, moment, moment.last, folder / "where")).code == -signal.SIGKILL
    )
    assert (folder / DIRECTORY / "run.db-wal").stat().st_size
    (folder / DIRECTORY / "run.db").unlink()
    found = []
    for directory in ("runs", "elsewhere"):
        assert call(folder, *RUN, "train.lr=0.01", f"output.directory={directory}").code == 0
        os.replace(folder / directory, folder / "runs")
        found.append(_content(folder))
        shutil.rmtree(folder / "runs")
    assert found[0] == found[1] != undisturbed.content


def _told(ended: Ended, code: int, message: str) -> bool:
    """Whether a command ended with that code and one line that holds the message."""
    lines = [line for line in ended.words.splitlines() if "UserWarning" not in line and "warnings.warn" not in line]
    assert ended.code == code, ended.words
    assert len(lines) == 1, ended.words
    return message in lines[0]


def _rounds(folder: Path) -> list[RoundRecord]:
    if not (folder / DIRECTORY / "run.db").exists():
        return []
    run = Run(folder / DIRECTORY)
    try:
        return run.rounds()
    finally:
        run.close()


def _content(folder: Path) -> str:
    connection = sqlite3.connect(folder / DIRECTORY / "run.db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    run = Run(folder / DIRECTORY)
    try:
        return content(run)
    finally:
        run.close()
