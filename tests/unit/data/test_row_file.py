"""Files of rows: what was written whole is read back, and nothing else ever is."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprompt.data.cache import row_file
from fedprompt.data.cache.row_file import BLOCK, RowFile, most_space, remove_unused, space
from fedprompt.io.cache_key import CODE

pytestmark = pytest.mark.unit

ROWS, BYTES = 40, 24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "some.rows"


def content(rows: np.ndarray, size: int = BYTES) -> np.ndarray:
    """What row k is made of, for every k."""
    made = [np.random.default_rng(int(row)).integers(0, 256, size, dtype=np.uint8) for row in rows]
    return np.stack([*made, np.empty(size, dtype=np.uint8)])[:-1]


def opened(path: Path) -> RowFile:
    return RowFile(path, ROWS, BYTES)


def filled(path: Path, rows: list[int]) -> RowFile:
    file = opened(path)
    assert file.write(np.array(rows), content(np.array(rows)))
    return file


@given(st.lists(st.sets(st.integers(0, ROWS - 1), min_size=1), max_size=6), st.lists(st.integers(0, ROWS - 1)))
def test_what_was_written_is_read_in_any_order_by_this_process_and_the_next(
    tmp_path_factory: pytest.TempPathFactory, written: list[set[int]], asked: list[int]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "some.rows"
    writer = opened(path)
    for rows in written:
        assert writer.write(np.array(sorted(rows)), content(np.array(sorted(rows))))
    there = set().union(*written)
    for file in (writer, opened(path)):
        everything = np.arange(ROWS)
        assert set(everything[file.holds(everything)].tolist()) == there
        wanted = np.array([row for row in asked if row in there], dtype=np.int64)
        assert (file.read(wanted) == content(wanted)).all()


@pytest.mark.parametrize("stretch", [1, BYTES, 3 * BYTES, row_file.STRETCH])
def test_the_length_of_reads_and_writes_does_not_show(
    path: Path, monkeypatch: pytest.MonkeyPatch, stretch: int
) -> None:
    monkeypatch.setattr(row_file, "STRETCH", stretch)
    rows = np.array([0, 1, 2, 3, 4, 7, 9, 10, 39])
    filled(path, rows.tolist())
    again = opened(path)
    assert again.holds(np.arange(ROWS)).nonzero()[0].tolist() == rows.tolist()
    assert (again.read(rows[::-1]) == content(rows[::-1])).all()


def test_a_row_is_looked_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, [3, 5])
    file = opened(path)
    assert not file.known(np.array([3, 5])).any()
    assert file.holds(np.array([5, 3, 5])).all()
    monkeypatch.setattr(row_file, "read_at", None)
    assert file.holds(np.array([3, 5])).all()
    assert file.known(np.array([3, 5])).all()


@pytest.mark.parametrize("byte", [0, BYTES // 2, BYTES - 1])
def test_a_changed_byte_is_noticed_and_the_row_can_be_written_again(path: Path, byte: int) -> None:
    filled(path, [1, 2, 3])
    with path.open("r+b") as file:
        file.seek(2 * BYTES + byte)
        old = file.read(1)[0]
        file.seek(2 * BYTES + byte)
        file.write(bytes([old ^ 1]))
    again = opened(path)
    assert again.holds(np.array([1, 2, 3])).tolist() == [True, False, True]
    assert again.write(np.array([2]), content(np.array([2])))
    assert opened(path).holds(np.array([1, 2, 3])).all()


def test_a_row_without_its_checksum_is_missing(path: Path) -> None:
    filled(path, [4, 5])
    with path.with_suffix(".mac").open("r+b") as file:  # as after a kill between the two writes
        file.seek(4 * CODE)
        file.write(bytes(CODE))
    assert opened(path).holds(np.array([4, 5])).tolist() == [False, True]


@pytest.mark.parametrize("suffix", [".rows", ".mac"])
def test_a_file_that_lost_its_end_lost_only_that(path: Path, suffix: str) -> None:
    filled(path, list(range(ROWS)))
    os.truncate(path.with_suffix(suffix), 10 * (BYTES if suffix == ".rows" else CODE) + 1)
    again = opened(path)
    assert again.holds(np.arange(ROWS)).tolist() == [True] * 10 + [False] * (ROWS - 10)
    assert again.write(np.arange(ROWS), content(np.arange(ROWS)))
    assert opened(path).holds(np.arange(ROWS)).all()


def test_a_row_of_zeros_is_a_row(path: Path) -> None:
    file = opened(path)
    file.write(np.array([6]), np.zeros((1, BYTES), dtype=np.uint8))
    assert opened(path).holds(np.array([6, 7])).tolist() == [True, False]


def test_nothing_is_there_where_the_folder_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    file = opened(tmp_path / "file" / "some.rows")
    assert isinstance(file.problem, OSError)
    assert not file.write(np.array([0]), content(np.array([0])))
    assert not file.holds(np.arange(ROWS)).any()
    assert file.read(np.array([], dtype=np.int64)).shape == (0, BYTES)


def test_a_cache_that_is_for_reading_only_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, [1, 2])
    real = os.open

    def refuse(name: object, flags: int, *rest: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(name, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    file = opened(path)
    assert "Read-only" in str(file.problem)
    assert file.holds(np.array([0, 1, 2])).tolist() == [False, True, True]
    assert (file.read(np.array([2, 1])) == content(np.array([2, 1]))).all()
    assert not file.write(np.array([0]), content(np.array([0])))


def test_a_disk_without_room_is_a_problem_and_what_was_written_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled(path, [0])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_file, "write_at", full)
    assert not file.write(np.array([1, 2]), content(np.array([1, 2])))
    assert "No space left" in str(file.problem)
    monkeypatch.undo()
    assert not file.write(np.array([1]), content(np.array([1])))
    for each in (file, opened(path)):
        assert each.holds(np.array([0, 1, 2])).tolist() == [True, False, False]


def _fill(path: Path, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(ROWS)
    file = opened(path)
    for start in range(0, ROWS, 5):
        rows = np.sort(order[start : start + 5])
        absent = rows[~file.holds(rows)]
        file.write(absent, content(absent))
        assert (file.read(rows) == content(rows)).all()


def test_many_processes_fill_one_file(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fill, args=(path, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    file = opened(path)
    assert file.holds(np.arange(ROWS)).all()
    assert (file.read(np.arange(ROWS)) == content(np.arange(ROWS))).all()


def test_threads_may_look_and_write_at_once(path: Path) -> None:
    file = opened(path)

    def work(first: int) -> None:
        for row in range(first, ROWS, 4):
            file.write(np.array([row]), content(np.array([row])))
            file.holds(np.arange(ROWS))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened(path).holds(np.arange(ROWS)).all()


@pytest.mark.skipif(
    "WITHOUT_UNIX" in os.environ, reason="Windows removes no open file, and Linux needs a lock for that"
)
def test_a_file_that_is_open_is_not_removed(path: Path) -> None:
    file = filled(path, [1])
    assert not remove_unused(path)
    assert path.exists()
    del file
    assert remove_unused(path)
    assert not path.exists()
    assert not path.with_suffix(".mac").exists()
    assert not remove_unused(path)


def test_a_file_removed_while_it_is_opened_is_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, [1])
    real, taken = row_file.keep_from_removal, []

    def remove_first(handle: int) -> None:
        if not taken:
            taken.append(handle)
            path.with_suffix(".mac").unlink()
            path.unlink()
        real(handle)

    monkeypatch.setattr(row_file, "keep_from_removal", remove_first)
    file = opened(path)
    assert not file.holds(np.arange(ROWS)).any()
    assert file.write(np.array([2]), content(np.array([2])))
    assert opened(path).holds(np.array([2])).all()


def test_space_is_what_was_written_and_not_what_could_be(path: Path) -> None:
    size = 2**16
    file = RowFile(path, 1000, size)
    assert space(path) == 0
    rows = np.array([3, 500])
    file.write(rows, content(rows, size))
    assert 2 * size <= space(path) <= 2 * size + 4 * resource.getpagesize()
    assert space(path.with_name("none.rows")) == 0


@given(st.sets(st.integers(0, 99), min_size=1), st.sampled_from([1, 24, 4096, 5000, 12288]))
def test_rows_take_no_more_space_than_was_said(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[int], size: int
) -> None:
    path, rows = tmp_path_factory.mktemp("rows") / "some.rows", np.array(sorted(chosen))
    RowFile(path, 100, size).write(rows, content(rows, size))
    assert space(path) <= most_space(rows, size) <= len(rows) * (size + 2 * BLOCK) + BLOCK


def test_no_handle_is_left_behind(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        filled(path, [1])
    assert len(os.listdir("/proc/self/fd")) == before
