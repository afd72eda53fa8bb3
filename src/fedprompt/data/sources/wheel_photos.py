"""Photographs of published wheels: fruit in shops (`groceries`) and chest X-rays (`xrays`).

Their wheels are pinned in `assets.py`. What is kept of one is written to a parquet file in the cache, once. The files
upstream have copies of images, and films of one patient on both sides of the split; neither is left here.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fedprompt.assets import IMAGE_SETS, ImageSet, read_files
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.errors import BackboneError, DataError, broken
from fedprompt.io.files import write_atomically

FRUIT = {
    "Golden-Delicious": "Golden Delicious apple",
    "Granny-Smith": "Granny Smith apple",
    "Pink-Lady": "Pink Lady apple",
    "Red-Delicious": "Red Delicious apple",
    "Royal-Gala": "Royal Gala apple",
    "Cantaloupe": "cantaloupe melon",
    "Galia-Melon": "Galia melon",
    "Honeydew-Melon": "honeydew melon",
    "Watermelon": "watermelon",
    "Orange": "orange",
    "Satsumas": "satsuma",
    "Anjou": "Anjou pear",
    "Conference": "Conference pear",
    "Kaiser": "Kaiser pear",
}  # names upstream, and names that a text tower knows
FILMS = {"NORMAL": "normal lungs", "PNEUMONIA": "pneumonia"}
PATIENT = re.compile(r"(person\d+|(?:NORMAL2-)?IM-\d+)[-_]")  # how the names of films begin
ROWS = 200  # of a row group: a run reads its images in no particular order


class Photo(NamedTuple):
    split: str
    label: int
    encoded: bytes


def open_photos(name: str, cache: Path) -> Source:
    """One of the sets; fetched first when the cache does not have it."""
    images = IMAGE_SETS[name]
    path = images.path(cache)
    if not path.is_file():
        write_atomically(path, _made(images, cache))
    source = ParquetSource(path, cache)
    source.name = name
    source.fingerprint = images.fingerprint
    return source


def fruit_photos(files: Mapping[str, bytes]) -> list[Photo]:
    """The rows of the one parquet file, in its order, each photograph once."""
    (content,) = files.values()
    columns = ["dataset", "finegrained_cat", "image_data"]
    table = pq.read_table(io.BytesIO(content), columns=columns).to_pydict()
    labels = {kind: label for label, kind in enumerate(FRUIT)}
    rows = zip(*(table[column] for column in columns), strict=True)
    return _once([Photo(split, labels[kind], encoded) for split, kind, encoded in rows])


def chest_films(files: Mapping[str, bytes]) -> list[Photo]:
    """One film for each patient, by the name of the file `split/class/film`.

    Who has a film in the test split upstream is a test patient. With one film each, patients are together in every
    partition, and in validation images too.
    """
    patients: dict[tuple[str, str], tuple[str, str]] = {}
    for name in sorted(files, key=lambda name: (not name.startswith("test/"), name)):
        split, kind, film = name.split("/")
        found = PATIENT.match(film)
        if found is None:
            raise DataError(broken("film", "begin with the number of the patient", name))
        patients.setdefault((kind, found[1]), (split, name))
    labels = {kind: label for label, kind in enumerate(FILMS)}
    return _once([Photo(split, labels[kind], files[name]) for (kind, _), (split, name) in patients.items()])


READERS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, bytes]], list[Photo]]]] = {
    "groceries": (tuple(FRUIT.values()), fruit_photos),
    "xrays": (tuple(FILMS.values()), chest_films),
}


def identity(classes: tuple[str, ...], photos: list[Photo]) -> str:
    """The fingerprint of a set: it does not depend on the version of pyarrow that wrote the file."""
    rows = [[photo.split, photo.label, hashlib.sha256(photo.encoded).hexdigest()] for photo in photos]
    return hashlib.sha256(json.dumps([classes, rows]).encode()).hexdigest()


def _once(photos: list[Photo]) -> list[Photo]:
    """Without copies: the first one stays."""
    kept: dict[bytes, Photo] = {}
    for photo in photos:
        kept.setdefault(photo.encoded, photo)
    return list(kept.values())


def _made(images: ImageSet, cache: Path) -> bytes:
    """The parquet file of a set."""
    try:
        files = read_files(images.member, cache)
    except BackboneError as error:  # here it is data that is missing
        raise DataError(f"data.source {images.name!r} needs {error}") from error
    classes, read = READERS[images.name]
    photos = read(files)
    found = identity(classes, photos)
    if found != images.fingerprint:
        raise DataError(broken(f"the content of {images.name}", f"have fingerprint {images.fingerprint}", found))
    table = pa.table(
        {
            "image": pa.array([photo.encoded for photo in photos], pa.binary()),
            "label": [photo.label for photo in photos],
            "split": [photo.split for photo in photos],
        }
    )
    names = json.dumps({"classes": list(classes), "domains": ["all"]})
    buffer = io.BytesIO()
    described = table.replace_schema_metadata({"fedprompt": names})
    pq.write_table(described, buffer, compression="none", row_group_size=ROWS)  # JPEG does not shrink any further
    return buffer.getvalue()
