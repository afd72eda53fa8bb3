"""The result of a partition: which client holds which images, as JSON that people can read, edit and use."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from fedprompt.data.partition import client_names
from fedprompt.data.partition.index_lists import MOST_BYTES, IndexLists
from fedprompt.data.sources.base import Source
from fedprompt.errors import DataError, RunError, broken
from fedprompt.io.bounded_read import read_text, strict_json
from fedprompt.io.files import write_atomically

FORMAT = "fedprompt-manifest-1"
LONGEST_NAME = 200  # of a client
PARTS = ("train", "test")
VALIDATION = "validation"  # the part that a manifest may lack
INDEX_LISTS = "index_lists"  # the fact of a run file that says who holds which images


@dataclass(frozen=True, eq=False)
class ClientData:
    """The images of one client, as indices into the source."""

    name: str
    train: np.ndarray
    test: np.ndarray
    validation: np.ndarray = field(default_factory=lambda: np.array([], dtype=np.int64))
    """Empty where no training images were kept for validation."""

    @property
    def lists(self) -> dict[str, list[int]]:
        """The numbers of its images by part, as JSON writes them."""
        parts = PARTS if not len(self.validation) else (*PARTS, VALIDATION)
        return {part: getattr(self, part).tolist() for part in parts}

    @cached_property
    def checksum(self) -> str:
        content = {"name": self.name, **self.lists}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Clients(Sequence[ClientData]):
    """All clients of a partition, each made on demand."""

    names: Sequence[str]
    train: IndexLists
    test: IndexLists
    validation: IndexLists | None = None
    """None where no client has validation images."""

    @classmethod
    def of(cls, clients: Iterable[ClientData]) -> Clients:
        held = tuple(clients)
        names = client_names.compact([client.name for client in held])
        lists = [IndexLists.of([getattr(each, part) for each in held]) for part in (*PARTS, VALIDATION)]
        return cls(names, *lists) if len(lists[-1].values) else cls(names, *lists[:-1])

    @property
    def parts(self) -> dict[str, IndexLists]:
        """The lists of all clients by part."""
        found = {"train": self.train, "test": self.test}
        return found if self.validation is None else {**found, VALIDATION: self.validation}

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> ClientData: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ClientData, ...]: ...
    def __getitem__(self, place: int | slice) -> ClientData | tuple[ClientData, ...]:
        if isinstance(place, slice):
            return tuple(map(ClientData, self.names[place], *(lists[place] for lists in self.parts.values())))
        return ClientData(self.names[place], *(lists[place] for lists in self.parts.values()))


@dataclass(frozen=True, eq=False)
class Manifest:
    """All clients, and the identity of their source. The checksum is always computed from the content."""

    source_name: str
    source_fingerprint: str
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    clients: Clients
    scheme: dict[str, Any]  # the settings that made it

    @cached_property
    def checksum(self) -> str:
        """The sha256 over everything else."""
        names = client_names.as_fact(self.clients.names)
        total = hashlib.sha256(json.dumps([self._head(), names], sort_keys=True).encode())
        for lists in self.clients.parts.values():
            for numbers in (lists.sizes, lists.values):
                total.update(numbers.astype("<i8").tobytes())
        return total.hexdigest()

    def to_json(self) -> str:
        """One line per client part, for text editors and diffs."""
        head = json.dumps({"format": FORMAT, **self._head(), "checksum": self.checksum}, indent=1)
        clients = ",\n".join(
            f'  {{"name": {json.dumps(client.name)}, "checksum": "{client.checksum}",\n   '
            + ",\n   ".join(f'"{part}": {json.dumps(numbers)}' for part, numbers in client.lists.items())
            + "}"
            for client in self.clients
        )
        return f'{head[:-2]},\n "clients": [\n{clients}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest. Checksums in the text are ignored: an edited manifest has a new one."""
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
            clients=Clients.of(_client(values, position) for position, values in enumerate(clients)),
            scheme=_field(raw, "scheme", dict),
        )

    def to_facts(self) -> dict[str, Any]:
        """The head in a run file: what identifies the manifest, without the lists of images."""
        packed = {part: lists.packed() for part, lists in self.clients.parts.items()}
        return {
            "manifest": {"format": FORMAT, **self._head(), "checksum": self.checksum},
            "clients": client_names.as_fact(self.clients.names),
            INDEX_LISTS: packed,
        }

    @classmethod
    def from_facts(cls, fact: Callable[[str], Any]) -> Manifest:
        """The manifest in a run file, also in an old one with JSON lists."""
        head, packed = fact("manifest"), fact(INDEX_LISTS)
        if not isinstance(packed, dict) or not isinstance(head, dict):
            return cls.from_json(json.dumps(head))
        try:
            names = client_names.from_fact(fact("clients"))
            parts = (*PARTS, VALIDATION) if VALIDATION in packed else PARTS
            lists = [IndexLists.unpacked(_field(packed, part, str, INDEX_LISTS)) for part in parts]
        except ValueError as error:
            raise DataError(f"manifest: the clients of the run {error}") from error
        for part, found in zip(parts, lists, strict=True):
            if len(found) != len(names):
                raise DataError(broken(f"{INDEX_LISTS}.{part}", f"hold {len(names)} lists", len(found)))
        empty = cls.from_json(json.dumps({**head, "clients": []}))
        manifest = replace(empty, clients=Clients(names, *lists))
        if manifest.checksum != head.get("checksum"):
            rule = f"be that of the clients beside it in the run file ({manifest.checksum[:12]}...)"
            raise RunError(broken("manifest.checksum", rule, head.get("checksum")))
        return manifest

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
        _check_names(self.clients.names)
        for client in self._at_fault(len(source)):
            for part in self.clients.parts:
                _check_indices(f"manifest.clients.{client.name}.{part}", getattr(client, part), len(source))
        self._check_apart("test", "train", "trains on it", len(source))
        if self.clients.validation is not None:
            self._check_apart(VALIDATION, "train", "trains on it", len(source))
            self._check_apart("test", VALIDATION, "validates on it", len(source))

    def _check_apart(self, part: str, other: str, verb: str, images: int) -> None:
        """Raise where an image of one part is in the other part of any client."""
        lists, others = self.clients.parts[part], self.clients.parts[other]
        used = np.zeros(images, dtype=bool)
        used[others.values] = True
        for place in np.flatnonzero(used[lists.values])[:1].tolist():
            index, owner = lists.values[place], self.clients[int(lists.owners[place])]
            holder = self.clients.names[int(others.owners[others.values == index][0])]
            kind = "training" if other == "train" else other
            rule = f"hold no {kind} image of any client ({holder!r} {verb})"
            raise DataError(broken(f"manifest.clients.{owner.name}.{part}", rule, int(index)))

    def _at_fault(self, images: int) -> Sequence[ClientData]:
        """The first client with an empty list, a number that is no image, or the same one twice."""
        fault = np.zeros(len(self.clients), dtype=bool)
        for lists in self.clients.parts.values():
            outside = (lists.values < 0) | (lists.values >= images)
            order = np.lexsort((lists.values, lists.owners))
            values, owners = lists.values[order], lists.owners[order]
            twice = (np.diff(values) == 0) & (np.diff(owners) == 0)
            fault |= lists.sizes == 0
            fault[lists.owners[outside]] = fault[owners[1:][twice]] = True
        return [self.clients[client] for client in np.flatnonzero(fault)[:1].tolist()]

    def domains_that_differ(self, domains: np.ndarray) -> list[dict[str, int]]:
        """Training images of every client by domain; nothing where all clients have the same domains."""
        found = []
        for client in self.clients:
            counts = np.bincount(domains[client.train], minlength=len(self.domain_names)).tolist()
            found.append({name: count for name, count in zip(self.domain_names, counts, strict=True) if count})
        return found if len({tuple(held) for held in found}) > 1 else []

    def class_matrix(self, labels: np.ndarray) -> np.ndarray:
        """Training images of every client and class, (clients, classes)."""
        train, classes = self.clients.train, len(self.class_names)
        cells = train.owners * classes + labels[train.values]
        return np.bincount(cells, minlength=len(train) * classes).reshape(len(train), classes)

    def picture(self, labels: np.ndarray, path: str | Path) -> None:
        """Draw the class matrix as a PNG."""
        from fedprompt.data.partition.partition_plot import (
            draw_matrix,  # imports matplotlib only for a picture
        )

        draw_matrix(self.class_matrix(labels), self.clients.names, self.class_names, Path(path))

    def _head(self) -> dict[str, Any]:
        return {
            "source": {"name": self.source_name, "fingerprint": self.source_fingerprint},
            "classes": list(self.class_names),
            "domains": list(self.domain_names),
            "scheme": self.scheme,
        }


def stored_checksum(fact: Callable[[str], Any]) -> object:
    """The checksum of the manifest in a run file; computed for an old one with JSON lists."""
    head = fact("manifest")
    if isinstance(head, dict) and "clients" not in head:
        return head.get("checksum")
    return Manifest.from_facts(fact).checksum


def _check_names(names: Sequence[str]) -> None:
    if isinstance(names, client_names.NumberedNames):
        return
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(broken("manifest.clients", "have different names", name))


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
    for part in (*PARTS, VALIDATION) if VALIDATION in values else PARTS:
        indices = _field(values, part, list, f"manifest.clients.{name}")
        for index in indices:
            if type(index) is not int or abs(index) >= 2**63:
                raise DataError(broken(f"manifest.clients.{name}.{part}", "hold integers", index))
        parts[part] = np.array(indices, dtype=np.int64)
    return ClientData(name, **parts)


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
