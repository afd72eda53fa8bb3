"""The run file: whole rounds or nothing, one writer, clear words when it cannot be used."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from fedprompt.errors import RunError, StorageError
from fedprompt.runs.store import RoundRecord, RunReader, RunStore

pytestmark = pytest.mark.unit


def record(number: int) -> RoundRecord:
    return RoundRecord(number, [0, 2], 0.5, 100, 50, {"average": 0.25}, {"train": 1.0})


def test_what_is_committed_is_read_back(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, {"config": {"seed": 3}})
    store.commit(record(0), b"shared", b"own", {2: b"state"}, {2: {"correct": 1}})
    reader = RunReader(tmp_path)
    assert reader.fact("config") == {"seed": 3}
    assert reader.rounds() == [record(0)]
    assert reader.server_state() == (0, b"shared", b"own")
    assert (reader.client_state(2), reader.client_state(1)) == (b"state", None)
    assert reader.evaluations(0) == {2: {"correct": 1}}


def test_a_commit_that_fails_half_way_leaves_no_trace(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, {})
    store.commit(record(0), b"old", b"", {1: b"old"}, {})
    with pytest.raises(TypeError):
        store.commit(record(1), b"new", b"", {1: b"new"}, {1: {"bad": object()}})
    assert store.server_state() == (0, b"old", b"")
    assert store.client_state(1) == b"old"
    assert [each.round for each in store.rounds()] == [0]


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    first = RunStore.create(tmp_path, {})
    with pytest.raises(RunError, match="another process"):
        RunStore(tmp_path)
    first.close()
    RunStore(tmp_path).close()


def test_a_reader_does_not_disturb_the_writer(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, {})
    reader = RunReader(tmp_path)
    reader.rounds()
    store.commit(record(0), b"", b"", {}, {})
    assert len(reader.rounds()) == 1


def test_a_new_run_never_replaces_an_old_one(tmp_path: Path) -> None:
    RunStore.create(tmp_path, {"a": 1}).close()
    with pytest.raises(RunError, match="already holds a run"):
        RunStore.create(tmp_path, {"a": 2})
    assert RunReader(tmp_path).fact("a") == 1


def test_a_draft_left_by_a_killed_process_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.db.new").write_bytes(b"half")
    RunStore.create(tmp_path, {"a": 1}).close()
    assert RunReader(tmp_path).fact("a") == 1


@pytest.mark.parametrize("junk", [b"", b"not a database" * 100])
def test_a_file_that_is_no_run_is_told(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "run.db").write_bytes(junk)
    with pytest.raises(RunError, match=r"run\.db"):
        RunReader(tmp_path)
    with pytest.raises(RunError, match=r"run\.db"):
        RunStore(tmp_path)


def test_a_run_of_another_format_is_told(tmp_path: Path) -> None:
    RunStore.create(tmp_path, {}).close()
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE facts SET value = '99' WHERE key = 'version'")
    with pytest.raises(RunError, match="format version 1, 2 or 3, got 99"):
        RunReader(tmp_path)


def test_a_missing_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="it does not exist"):
        RunReader(tmp_path / "nothing")


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"output\.directory must be writable"):
        RunStore.create(tmp_path / "file" / "run", {})


def test_a_full_disk_is_a_storage_error_and_loses_nothing(tmp_path: Path) -> None:
    """The store's own page limit stands in for a disk without room: SQLite reports both in the same way."""
    store = RunStore.create(tmp_path, {})
    store.commit(record(0), b"old", b"", {}, {})
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StorageError, match="full"):
        store.commit(record(1), os.urandom(1_000_000), b"", {}, {})
    assert store.server_state() == (0, b"old", b"")
