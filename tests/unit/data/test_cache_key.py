"""What is kept in a cache counts only where the owner of the cache wrote it there."""

from __future__ import annotations

import os
import shutil
import stat
import zlib
from pathlib import Path

import numpy as np
import pytest

from fedprompt.data.cache import fingerprint
from fedprompt.data.cache.row_file import RowFile
from fedprompt.io.cache_key import CODE, NAME, folder_key
from fedprompt.io.files import open_plain

pytestmark = pytest.mark.unit

ROWS, BYTES = 6, 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of rows that is full."""
    path = tmp_path / "cache" / "some.rows"
    assert RowFile(path, ROWS, BYTES).write(np.arange(ROWS), content())
    return path


def content() -> np.ndarray:
    return np.arange(ROWS * BYTES, dtype=np.uint8).reshape(ROWS, BYTES)


def held(path: Path) -> list[bool]:
    return RowFile(path, ROWS, BYTES).holds(np.arange(ROWS)).tolist()


def swap(path: Path, size: int, one: int, other: int) -> None:
    whole = bytearray(path.read_bytes())
    first, second = (slice(place * size, (place + 1) * size) for place in (one, other))
    whole[first], whole[second] = whole[second], whole[first]
    path.write_bytes(whole)


def test_the_secret_is_its_owners_alone(path: Path) -> None:
    status = (path.parent / NAME).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_size) == (0o600, 32)
    assert sorted(each.name for each in path.parent.iterdir()) == sorted([NAME, "some.mac", "some.rows"])
    assert held(path) == [True] * ROWS


def test_a_row_counts_in_its_own_place_only(path: Path) -> None:
    swap(path, BYTES, 1, 4)
    swap(path.with_suffix(".mac"), CODE, 1, 4)
    assert held(path) == [True, False, True, True, False, True]


def test_a_row_counts_in_its_own_file_only(path: Path) -> None:
    for suffix in (".rows", ".mac"):
        shutil.copy(path.with_suffix(suffix), path.with_name(f"other{suffix}"))
    assert held(path.with_name("other.rows")) == [False] * ROWS


def test_a_copy_of_the_whole_folder_is_made_again(path: Path, tmp_path: Path) -> None:
    """An archive of a stranger brings rows, codes and a secret that fit each other."""
    shutil.copytree(path.parent, tmp_path / "unpacked")
    copy = tmp_path / "unpacked" / path.name
    assert held(copy) == [False] * ROWS
    assert RowFile(copy, ROWS, BYTES).write(np.arange(ROWS), content())
    assert held(copy) == [True] * ROWS
    shutil.move(path.parent, tmp_path / "moved")  # the same files under another name
    assert held(tmp_path / "moved" / path.name) == [True] * ROWS


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602])
def test_a_secret_that_others_can_get_at_is_none(path: Path, mode: int) -> None:
    (path.parent / NAME).chmod(mode)
    file = RowFile(path, ROWS, BYTES)
    assert "readable by its owner alone" in str(file.problem)
    assert not file.holds(np.arange(ROWS)).any()


def test_a_secret_of_somebody_else_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "readable by its owner alone" in str(RowFile(path, ROWS, BYTES).problem)


@pytest.mark.parametrize(("mode", "fine"), [(0o755, True), (0o775, False), (0o757, False)])
def test_a_folder_of_somebody_else_that_others_write_to_is_refused(
    path: Path, mode: int, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.chmod(mode)
    assert RowFile(path, ROWS, BYTES).problem is None  # one's own
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    problem = str(RowFile(path, ROWS, BYTES).problem)
    assert ("belongs to another user, and others may write to it" in problem) is not fine


def test_a_secret_that_is_a_link_or_too_short_is_none(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedprompt.io.cache_key.PATIENCE", 0.0)
    (path.parent / NAME).rename(tmp_path / "elsewhere")
    (path.parent / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        folder_key(path.parent, create=True)
    (path.parent / NAME).unlink()
    (path.parent / NAME).write_bytes(b"short")
    with pytest.raises(OSError, match="32 bytes"):
        folder_key(path.parent, create=True)


def test_files_of_older_versions_are_made_again(path: Path) -> None:
    path.with_suffix(".mac").unlink()
    (path.parent / NAME).unlink()
    sums = b"".join(zlib.crc32(row.tobytes()).to_bytes(4, "little") for row in content())
    path.with_suffix(".crc").write_bytes(sums)
    file = RowFile(path, ROWS, BYTES)
    assert file.problem is None
    assert not file.holds(np.arange(ROWS)).any()
    assert file.write(np.arange(ROWS), content())
    assert held(path) == [True] * ROWS
    assert not path.with_suffix(".crc").exists()


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no plain file"):
        open_plain(tmp_path / "pipe", os.O_RDONLY)


def test_links_are_told_where_the_system_has_no_flag_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    monkeypatch.delattr(os, "O_NOFOLLOW")
    with pytest.raises(OSError, match="symbolic links"):
        open_plain(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "precious").exists()


def test_a_fingerprint_that_a_stranger_noted_is_taken_anew(tmp_path: Path) -> None:
    image, cache = tmp_path / "image.png", tmp_path / "cache"
    image.write_bytes(b"one")
    truth = fingerprint.of_file(image, cache)
    (note,) = [each for each in (cache / "fingerprints").iterdir() if each.name != NAME]
    for forgery in (b"0" * 64, b"0" * 64 + note.read_bytes()[64:], b"0" * 64 + bytes(CODE)):
        note.write_bytes(forgery)
        assert fingerprint.of_file(image, cache) == truth


def test_a_file_put_in_the_place_of_another_is_hashed_again(tmp_path: Path) -> None:
    image, cache = tmp_path / "image.png", tmp_path / "cache"
    image.write_bytes(b"one")
    before, status = fingerprint.of_file(image, cache), image.stat()
    (tmp_path / "new").write_bytes(b"two")
    os.utime(tmp_path / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(tmp_path / "new", image)
    assert fingerprint.of_file(image, cache) != before


def test_a_fingerprint_needs_no_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    (tmp_path / "image.png").write_bytes(b"one")
    assert len(fingerprint.of_file(tmp_path / "image.png", tmp_path / "cache")) == 64
