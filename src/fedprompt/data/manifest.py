"""The result of a partition: which client holds which images, as JSON that people can read, edit and give back."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedprompt.assets import write_atomically
from fedprompt.data.base import Source
from fedprompt.errors import DataError, broken
from fedprompt.reading import read_text, strict_json

FORMAT = "fedprompt-manifest-1"
MOST_BYTES = 2**27  # of a manifest: some fifteen million images

LONGEST_NAME = 200  #: of a client


@dataclass(frozen=True, eq=False)
class ClientData:
    """The images of one client, as indices into the source."""

    name: str
    train: np.ndarray
    test: np.ndarray

    @cached_property
    def checksum(self) -> str:
        return _digest({"name": self.name, "train": self.train.tolist(), "test": self.test.tolist()})


@dataclass(frozen=True, eq=False)
class Manifest:
    """All clients, and what tells whether they belong to a source. The checksum always follows the content."""

    source_name: str
    source_fingerprint: str
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    clients: tuple[ClientData, ...]
    scheme: dict[str, Any]  # the settings that made it

    @cached_property
    def checksum(self) -> str:
        """The sha256 over everything else."""
        clients = [client.checksum for client in self.clients]
        return _digest([self._head(), clients])

    def to_json(self) -> str:
        """One line per client part: a text editor and a diff can cope with it."""
        head = json.dumps({"format": FORMAT, **self._head(), "checksum": self.checksum}, indent=1)
        clients = ",\n".join(
            f'  {{"name": {json.dumps(client.name)}, "checksum": "{client.checksum}",\n'
            f'   "train": {json.dumps(client.train.tolist())},\n   "test": {json.dumps(client.test.tolist())}}}'
            for client in self.clients
        )
        return f'{head[:-2]},\n "clients": [\n{clients}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest. Checksums in the text are not believed: an edited manifest simply has a new one."""
        try:
            raw = strict_json(text)
        except ValueError as error:
            raise DataError(f"manifest: not JSON: {error}") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            value = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise DataError(broken("manifest.format", f"be {FORMAT!r}", value))
        source = _field(raw, "source", dict)
        clients = _field(raw, "clients", list)
        return cls(
            source_name=_field(source, "name", str, "manifest.source"),
            source_fingerprint=_field(source, "fingerprint", str, "manifest.source"),
            class_names=_names(raw, "classes"),
            domain_names=_names(raw, "domains"),
            clients=tuple(_client(values, position) for position, values in enumerate(clients)),
            scheme=_field(raw, "scheme", dict),
        )

    def save(self, path: str | Path) -> None:
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        try:
            text = read_text(Path(path), MOST_BYTES)
        except (OSError, ValueError) as error:
            raise DataError(f"partition.manifest: cannot read {str(path)!r}: {error}") from error
        return cls.from_json(text)

    def check(self, source: Source) -> None:
        """Refuse a manifest of other images, and edits that make a client empty or let a test image be trained on."""
        if self.source_fingerprint != source.fingerprint:
            rule = (
                f"be that of data.source {source.name!r} ({source.fingerprint[:12]}...): it was made for other images"
            )
            raise DataError(broken("manifest.source.fingerprint", rule, self.source_fingerprint))
        if self.class_names != source.class_names:
            raise DataError(broken("manifest.classes", f"be {list(source.class_names)}", list(self.class_names)))
        if self.domain_names != source.domain_names:
            raise DataError(broken("manifest.domains", f"be {list(source.domain_names)}", list(self.domain_names)))
        if not self.clients:
            raise DataError(broken("manifest.clients", "hold at least one client", []))
        for name, times in Counter(client.name for client in self.clients).items():
            if times > 1:
                raise DataError(broken("manifest.clients", "have different names", name))
        trained = np.zeros(len(source), dtype=bool)
        for client in self.clients:
            for part, indices in (("train", client.train), ("test", client.test)):
                _check_indices(f"manifest.clients.{client.name}.{part}", indices, len(source))
            trained[client.train] = True
        for client in self.clients:
            for index in client.test[trained[client.test]][:1]:
                holder = next(other.name for other in self.clients if index in other.train)
                rule = f"hold no training image of any client ({holder!r} trains on it)"
                raise DataError(broken(f"manifest.clients.{client.name}.test", rule, int(index)))

    def class_matrix(self, labels: np.ndarray) -> np.ndarray:
        """Training images of every client and class, (clients, classes)."""
        return np.stack([np.bincount(labels[client.train], minlength=len(self.class_names)) for client in self.clients])

    def picture(self, labels: np.ndarray, path: str | Path) -> None:
        """Draw the class matrix as a PNG."""
        from fedprompt.data.pictures import draw_matrix  # matplotlib only when a picture is wanted

        draw_matrix(self.class_matrix(labels), [client.name for client in self.clients], self.class_names, Path(path))

    def _head(self) -> dict[str, Any]:
        return {
            "source": {"name": self.source_name, "fingerprint": self.source_fingerprint},
            "classes": list(self.class_names),
            "domains": list(self.domain_names),
            "scheme": self.scheme,
        }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_indices(field: str, indices: np.ndarray, count: int) -> None:
    if not len(indices):
        raise DataError(broken(field, "hold at least one image", []))
    for index in indices[(indices < 0) | (indices >= count)][:1]:
        raise DataError(broken(field, f"hold indices in 0..{count - 1}", int(index)))
    values, times = np.unique(indices, return_counts=True)
    for index in values[times > 1][:1]:
        raise DataError(broken(field, "hold every image once", int(index)))


def _client(values: Any, position: int) -> ClientData:
    field = f"manifest.clients.{position}"
    if not isinstance(values, dict):
        raise DataError(broken(field, "be a mapping", values))
    name = _field(values, "name", str, field)
    if not 0 < len(name) <= LONGEST_NAME:
        raise DataError(broken(f"{field}.name", f"have 1 to {LONGEST_NAME} letters", name))
    parts = {}
    for part in ("train", "test"):
        indices = _field(values, part, list, f"manifest.clients.{name}")
        for index in indices:
            if type(index) is not int or abs(index) >= 2**63:
                raise DataError(broken(f"manifest.clients.{name}.{part}", "hold integers", index))
        parts[part] = np.array(indices, dtype=np.int64)
    return ClientData(name, parts["train"], parts["test"])


def _names(raw: dict[str, Any], key: str) -> tuple[str, ...]:
    names = _field(raw, key, list)
    for name in names:
        if not isinstance(name, str):
            raise DataError(broken(f"manifest.{key}", "hold names", name))
    return tuple(names)


def _field(raw: dict[str, Any], key: str, kind: type, parent: str = "manifest") -> Any:
    if not isinstance(raw.get(key), kind):
        raise DataError(broken(f"{parent}.{key}", f"be a {kind.__name__}", raw.get(key)))
    return raw[key]
