"""Sets of the `datasets` library: a hub id, or a folder made by `save_to_disk`. Its Arrow files are memory-mapped."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedprompt.data.cache.fingerprint import remembered
from fedprompt.data.sources.base import NO_DOMAINS, SPLITS, Source, decode, encode_names
from fedprompt.data.sources.sentences import TEXT_COLUMNS, SentenceSource
from fedprompt.errors import DataError, broken

IMAGE_COLUMNS = ("image", "img", "picture")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class")
DOMAIN_COLUMNS = ("domain", "style")


def known_splits(name: str, splits: dict[str, Any]) -> dict[str, Any]:
    """The splits that are used: those of known names, or the only one there is."""
    chosen = splits if len(splits) == 1 else {split: rows for split, rows in splits.items() if split in SPLITS}
    if not chosen:
        raise DataError(broken(f"splits of {name!r}", f"include some of {sorted(SPLITS)}", sorted(splits)))
    return chosen


class HubSource(Source):
    """The splits of a dataset one after the other. A set with a single split counts as one without splits."""

    def __init__(self, name: str, splits: dict[str, Any], cache: Path) -> None:
        import datasets

        self.name = name
        chosen = known_splits(name, splits)
        first = next(iter(chosen.values()))
        image = _column(name, first, IMAGE_COLUMNS, "image")
        label = _column(name, first, LABEL_COLUMNS, "label")
        domain = next((column for column in DOMAIN_COLUMNS if column in first.column_names), None)
        self._image = image
        self._parts = [rows.cast_column(image, datasets.Image(decode=False)) for rows in chosen.values()]
        sizes = [len(rows) for rows in self._parts]
        self._first_rows = np.concatenate([[0], np.cumsum(sizes)])
        self.labels, self.class_names = self._names(label, "label")
        self.domains, self.domain_names = np.zeros(sum(sizes), dtype=np.int64), NO_DOMAINS
        if domain is not None:
            self.domains, self.domain_names = self._names(domain, "domain")
        self.splits = np.repeat([SPLITS[split] for split in chosen], sizes) if len(splits) > 1 else None
        files = [Path(file["filename"]) for rows in self._parts for file in rows.cache_files]
        self.fingerprint = remembered(files, cache, self._hash) if files else self._hash()

    def image(self, index: int) -> Image.Image:
        where = f"{self.name} row {index}"
        part = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        return decode(_encoded(self._parts[part][int(index - self._first_rows[part])][self._image], where), where)

    def _names(self, column: str, field: str) -> tuple[np.ndarray, tuple[str, ...]]:
        values = [value for rows in self._parts for value in rows[column]]
        names = getattr(self._parts[0].features[column], "names", None)
        return encode_names(values, tuple(names) if names is not None else None, field, self.name)

    def _hash(self) -> str:
        """Over encoded images and labels: the library's own fingerprint changes from machine to machine."""
        total = hashlib.sha256(np.stack([self.labels, self.domains]).tobytes())
        row = 0
        for rows in self._parts:
            for value in rows[self._image]:
                encoded = _encoded(value, f"{self.name} row {row}")
                total.update(encoded if isinstance(encoded, bytes) else encoded.read_bytes())
                row += 1
        return total.hexdigest()


def open_hub(address: str, cache: Path) -> Source:
    """`owner/name`, `owner/name:configuration`, or a folder of `save_to_disk`."""
    import datasets

    folder = Path(address).expanduser()
    name, _, configuration = address.partition(":")
    try:
        if folder.is_dir():
            loaded = datasets.load_from_disk(str(folder))
            name = folder.resolve().name
        else:
            loaded = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # network, permissions, unknown names and broken files all have their own class there
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"data.source: the `datasets` library cannot load {address!r}: {reason}. Check the id and the network; or load it on "
            "a machine that has access, `save_to_disk` it, and give that folder as data.source"
        ) from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"all": loaded}
    return hub_sentences(name, splits) if _has_sentences(splits) else HubSource(name, splits, cache)


def _has_sentences(splits: dict[str, Any]) -> bool:
    """Whether the rows have a text and no image."""
    columns = next(iter(splits.values())).column_names
    return not set(columns) & set(IMAGE_COLUMNS) and bool(set(columns) & set(TEXT_COLUMNS))


def hub_sentences(name: str, splits: dict[str, Any]) -> SentenceSource:
    """A set of labelled sentences."""
    chosen = known_splits(name, splits)
    first = next(iter(chosen.values()))
    text, label = _column(name, first, TEXT_COLUMNS, "text"), _column(name, first, LABEL_COLUMNS, "label")
    domain = next((column for column in DOMAIN_COLUMNS if column in first.column_names), None)

    def values(column: str) -> list[Any]:
        return [value for rows in chosen.values() for value in rows[column]]

    def names(column: str) -> tuple[str, ...] | None:
        found = getattr(first.features[column], "names", None)
        return None if found is None else tuple(found)

    return SentenceSource(
        name,
        values(text),
        values(label),
        classes=names(label),
        domains=None if domain is None else values(domain),
        domain_names=None if domain is None else names(domain),
        splits=[split for split, rows in chosen.items() for _ in range(len(rows))] if len(splits) > 1 else None,
    )


def _column(name: str, rows: Any, candidates: tuple[str, ...], what: str) -> str:
    for column in candidates:
        if column in rows.column_names:
            return column
    raise DataError(
        broken(f"columns of {name!r}", f"include an {what} column ({', '.join(candidates)})", rows.column_names)
    )


def _encoded(value: Any, where: str) -> bytes | Path:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return value["bytes"]
    if isinstance(value, dict) and isinstance(value.get("path"), str) and Path(value["path"]).is_file():
        return Path(value["path"])
    raise DataError(f"{where}: " + broken("image", "be encoded bytes or an existing file", value))
