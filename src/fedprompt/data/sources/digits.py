"""fedprompt-digits: ten digits in six looks, made on this machine from pinned wheels, fonts and arithmetic.

It is a set for experiments on domain shift that needs no download site: a package registry is enough, and only once.
The images are rendered once into a parquet file in the cache; its identity is the sha256 of its pixels, so two machines
can tell whether they have the same set.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from fedprompt.data import seeded_streams
from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources import digit_glyphs, digit_styles
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.digit_glyphs import MEMBERS, font_checksums, load_material
from fedprompt.data.sources.digit_styles import SIDE, STYLES
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.io.files import write_atomically

NAME = "fedprompt-digits"
SEED = 1
CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN, TEST = 120, 40  # per (domain, class): the optical digits have 174 of the rarest class


def path(cache: Path) -> Path:
    """Where the rendered set is kept."""
    return cache / "data" / f"{NAME}-{recipe()[:16]}.parquet"


def open_embedded(cache: Path) -> Source:
    """The set, rendered first when the cache does not have it."""
    rendered = path(cache)
    if not rendered.is_file():
        write_atomically(rendered, render(cache))
    source = ParquetSource(rendered, cache)
    source.name = NAME
    source.fingerprint = json.loads(pq.read_schema(rendered).metadata[b"fedprompt"])["fingerprint"]
    return source


def recipe() -> str:
    """The identity of everything that decides on the pixels, the painting code too: a change in any of it makes a new
    file.
    """
    wheels = {name: member.member_sha256 for name, member in MEMBERS.items()}
    code = [inspect.getsource(module) for module in (digit_glyphs, digit_styles, seeded_streams)]
    parts = [SEED, code, PIL.__version__, np.__version__, wheels, font_checksums(), TRAIN, TEST, SIDE]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def render(cache: Path) -> bytes:
    """Paint all images and return the parquet file. Every image has a random stream of its own."""
    material = load_material(cache)
    columns: dict[str, list[object]] = {name: [] for name in ("image", "label", "domain", "split", "rank")}
    pixels_seen = hashlib.sha256()
    for domain, (style, paint) in enumerate(STYLES.items()):
        for digit in range(len(CLASSES)):
            for example in range(TRAIN + TEST):
                pixels = paint(digit, example, material, stream(SEED, NAME, style, digit, example))
                pixels_seen.update(pixels.tobytes())
                train = example < TRAIN
                row = (_png(pixels), digit, domain, "train" if train else "test", example if train else example - TRAIN)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
    names = {"classes": list(CLASSES), "domains": list(STYLES), "fingerprint": pixels_seen.hexdigest()}
    table = pa.table(columns).replace_schema_metadata({"fedprompt": json.dumps(names)})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="none", row_group_size=1600)  # PNG bytes do not shrink any further
    return buffer.getvalue()


def contact_sheet(source: Source, per_cell: int) -> Image.Image:
    """A picture of a source: a row of cells per domain, a column per class, `per_cell` training images side by side."""
    side, margin, gap = SIDE, 92, 4
    width = len(source.class_names) * (per_cell * side + gap)
    sheet = Image.new("RGB", (margin + width, 20 + len(source.domain_names) * (side + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for label, name in enumerate(source.class_names):
        draw.text((margin + label * (per_cell * side + gap), 4), name, fill="black")
    training = np.ones(len(source), dtype=bool) if source.splits is None else source.splits == "train"
    for domain, name in enumerate(source.domain_names):
        top = 20 + domain * (side + gap)
        draw.text((4, top + side // 2 - 6), name, fill="black")
        for label in range(len(source.class_names)):
            cell = np.flatnonzero((source.domains == domain) & (source.labels == label) & training)
            for column, index in enumerate(cell[:per_cell]):
                left = margin + label * (per_cell * side + gap) + column * side
                sheet.paste(source.image(int(index)).resize((side, side)), (left, top))
    return sheet


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    grey = (pixels == pixels[..., :1]).all()
    Image.fromarray(pixels[..., 0] if grey else pixels).save(buffer, "PNG", compress_level=2)
    return buffer.getvalue()
