"""Named pictograms as training pictures: three emoji fonts out of npm packages, used as data.

Photographs alone teach the bridge nothing about drawings. Three sets of emoji with permissive licences name more than a
thousand things; each is drawn three times: as it is on white, on a random colour at a random size and place, and as a line drawing.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

SIDE = 160  # of a drawn picture; resized again for the image tower
LOOKS = ("plain", "placed", "lines")


@dataclass(frozen=True)
class Package:
    """One npm package, pinned."""

    name: str
    version: str
    sha256: str
    pictures: str  # folder inside the archive
    suffix: str
    licence: str  # of the pictures

    @property
    def file(self) -> str:
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


PACKAGES = (
    Package(
        name="emoji-datasource-google",
        version="16.0.0",
        sha256="fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
        pictures="package/img/google/64/",
        suffix=".png",
        licence="Apache-2.0 (Noto Emoji)",
    ),
    Package(
        name="emoji-datasource-twitter",
        version="16.0.0",
        sha256="f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
        pictures="package/img/twitter/64/",
        suffix=".png",
        licence="CC-BY-4.0 (Twemoji, Twitter and contributors)",
    ),
    Package(
        name="@lobehub/fluent-emoji-3d",
        version="1.1.0",
        sha256="c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
        pictures="package/assets/",
        suffix=".webp",
        licence="MIT (Fluent Emoji, Microsoft)",
    ),
)


@dataclass(frozen=True)
class Emoji:
    """One thing with its names; `coarse` come from the group it belongs to."""

    code: str
    name: str
    alternative: tuple[str, ...]
    coarse: tuple[str, ...]


def fetch(package: Package, folder: Path) -> Path:
    """The checked archive of a package: in `folder`, or downloaded there with npm."""
    path = folder / package.file
    if not path.is_file():
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise SystemExit(f"{package.file} must have sha256 {package.sha256}, got {found}")
    return path


def read_emoji(folder: Path, groups: dict[str, list[str]]) -> list[Emoji]:
    """Every emoji of a group that `groups` lists, without skin tones; groups that are not listed are left out."""
    with tarfile.open(fetch(PACKAGES[0], folder)) as archive:
        stream = archive.extractfile("package/emoji.json")
        assert stream is not None
        entries: list[dict[str, Any]] = json.load(stream)
    found = [_emoji(entry, groups[entry["subcategory"]]) for entry in entries if entry["subcategory"] in groups]
    return sorted((emoji for emoji in found if emoji is not None), key=lambda emoji: emoji.code)


def _emoji(entry: dict[str, Any], coarse: list[str]) -> Emoji | None:
    name = _clean(entry["name"])
    if "facing right" in name or name.startswith("clock face"):
        return None
    others = [_clean(short) for short in entry["short_names"]]
    people = [word for word in ("man", "woman", "boy", "girl") if re.search(rf"\b{word}\b", name)]
    alternative = [other for other in dict.fromkeys(others) if other != name and len(other) > 2]
    return Emoji(entry["unified"].lower(), name, tuple(alternative), tuple(w for w in people + coarse if w != name))


def _clean(name: str) -> str:
    """Upper-case names of the Unicode list and short names with underscores, in plain words."""
    plain = re.sub(r"[_\s]+", " ", name.lower().replace(":", "")).strip()
    plain = re.sub(r"^(black|white|electric) (?=telephone|scissors|light bulb|torch|sun)", "", plain)
    return re.sub(r"(?<=\w) (face|symbol|sign|building)$", "", plain)


def draw(folder: Path, emoji: list[Emoji], seed: int) -> Iterator[tuple[int, str, Image.Image]]:
    """(which emoji, look, picture) for every font, emoji and look, in a fixed order."""
    for number, package in enumerate(PACKAGES):
        with tarfile.open(fetch(package, folder)) as archive:
            content = {
                _code(member.name, package): member for member in archive if member.name.endswith(package.suffix)
            }
            for index, one in enumerate(emoji):
                member = content.get(_plain_code(one.code))
                stream = member and archive.extractfile(member)
                if not stream:
                    continue
                with Image.open(io.BytesIO(stream.read())) as opened:
                    picture = opened.convert("RGBA")
                random = np.random.default_rng((seed, number, index))
                for forward in LOOKS:
                    yield index, forward, _LOOKS[forward](picture, random)


def _code(path: str, package: Package) -> str:
    return _plain_code(path.removeprefix(package.pictures).removesuffix(package.suffix))


def _plain_code(code: str) -> str:
    """Fonts disagree on the variation selector."""
    return "-".join(part.lstrip("0") for part in code.split("-") if part != "fe0f")


def _place(picture: Image.Image, side: int, corner: tuple[int, int], colour: tuple[int, int, int]) -> Image.Image:
    canvas = Image.new("RGBA", (SIDE, SIDE), (*colour, 255))
    canvas.alpha_composite(picture.resize((side, side), Image.Resampling.BICUBIC), corner)
    return canvas.convert("RGB")


def _plain(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    margin = SIDE // 16
    return _place(picture, SIDE - 2 * margin, (margin, margin), (255, 255, 255))


def _placed(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    side = int(random.integers(SIDE // 2, SIDE + 1))
    left, top = (int(value) for value in random.integers(0, SIDE - side + 1, size=2))
    red, green, blue = (int(value) for value in random.integers(0, 256, size=3))
    mirrored = ImageOps.mirror(picture) if random.random() < 0.5 else picture
    return _place(mirrored, side, (left, top), (red, green, blue))


def _lines(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    return line_drawing(_plain(picture, random))


def line_drawing(picture: Image.Image) -> Image.Image:
    """Dark lines on white where the brightness of a smoothed picture changes."""
    grey = np.asarray(picture.convert("L").filter(ImageFilter.GaussianBlur(1.5)), dtype=np.float32)
    change = np.hypot(*np.gradient(grey))
    strength = np.clip(change / max(8.0, float(np.quantile(change, 0.97))), 0, 1) ** 0.8
    return Image.fromarray((255 * (1 - strength)).astype(np.uint8)).convert("RGB")


_LOOKS = {"plain": _plain, "placed": _placed, "lines": _lines}
