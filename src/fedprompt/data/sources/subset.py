"""A part of a source: some of its classes, and a limited number of images of every domain."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from PIL import Image

from fedprompt.config import DataConfig
from fedprompt.data.partition.split import cells
from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources.base import Source
from fedprompt.errors import ConfigError, DataError, broken, did_you_mean, same_name


class Selection(Source):
    """Some images of another source, in its order; labels count the chosen classes."""

    def __init__(self, whole: Source, indices: np.ndarray, class_names: tuple[str, ...]) -> None:
        self._whole, self._indices, self.holds = whole, indices, whole.holds
        self.name, self.class_names, self.domain_names = whole.name, class_names, whole.domain_names
        places = {name: place for place, name in enumerate(class_names)}
        renamed = np.array([places.get(name, -1) for name in whole.class_names])
        self.labels = renamed[whole.labels[indices]]
        self.domains = whole.domains[indices]
        self.splits = None if whole.splits is None else whole.splits[indices]
        self.ranks = None if whole.ranks is None else whole.ranks[indices]
        self.groups = None if whole.groups is None else whole.groups[indices]
        identity = hashlib.sha256(json.dumps([whole.fingerprint, class_names]).encode())
        identity.update(indices.astype("<i8").tobytes())
        self.fingerprint = identity.hexdigest()

    def image(self, index: int) -> Image.Image:
        return self._whole.image(int(self._indices[index]))

    def sentence(self, index: int) -> str:
        return self._whole.sentence(int(self._indices[index]))


def select(source: Source, data: DataConfig) -> Source:
    """What `data.classes` and `data.per_domain` leave of a source, novel classes included."""
    if data.classes is None and data.per_domain is None:
        return source
    class_names = source.class_names if data.classes is None else _known(data.classes, source)
    kept = np.array([name in class_names for name in source.class_names])
    indices = np.flatnonzero(kept[source.labels])
    if data.per_domain is not None:
        indices = few_per_domain(source, indices, data.per_domain, data.split_seed)
    return Selection(source, indices, class_names)


def base_and_novel(source: Source, share: float) -> tuple[Source, Source]:
    """The classes a federation learns and those it is only tested on: of C classes the last floor(share * C) are novel.

    Of an odd number of classes the larger half is base, as in CoOp. Each part counts its own labels.
    """
    count = len(source.class_names)
    novel = min(int(share * count + 1e-9), count - 1)
    if not novel:
        raise ConfigError(broken("data.novel", f"be at least one of the {count} classes of {source.name!r}", share))
    return of_classes(source, source.class_names[: count - novel]), of_classes(source, source.class_names[-novel:])


def of_classes(source: Source, class_names: tuple[str, ...]) -> Selection:
    """All images of some classes."""
    kept = np.array([name in class_names for name in source.class_names])
    return Selection(source, np.flatnonzero(kept[source.labels]), class_names)


def few_per_domain(source: Source, indices: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """At most `limit` images of every domain: images are taken from the classes in turn until the domain is full.

    Training and test images count alike and keep their proportion in every class; validation images, which are not
    used, are left out.
    """
    generator = stream(seed, "per_domain")
    splits = source.splits if source.splits is not None else np.full(len(source), "all")
    order = source.ranks if source.ranks is not None else generator.permutation(len(source))
    indices = indices[splits[indices] != "val"]
    chosen = [np.array([], dtype=np.int64)]
    for domain in range(len(source.domain_names)):
        inside = indices[source.domains[indices] == domain]
        queues = [_in_proportion(cell, splits, order) for cell in cells(inside, source.labels, source.domains)]
        turn = generator.permutation(len(queues))  # which classes get one more when the limit is no multiple
        if queues:
            images = np.concatenate(queues)
            place = np.concatenate([np.arange(len(queue)) for queue in queues])
            first = np.lexsort((turn.repeat([len(queue) for queue in queues]), place))
            chosen.append(images[first[:limit]])
    return np.sort(np.concatenate(chosen))


def _in_proportion(cell: np.ndarray, splits: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The images of a cell in such an order that every beginning has its proportion of training and test images."""
    place = np.zeros(len(cell))
    for split in np.unique(splits[cell]):
        part = np.flatnonzero(splits[cell] == split)
        place[part[np.argsort(order[cell[part]], kind="stable")]] = (np.arange(len(part)) + 0.5) / len(part)
    return cell[np.argsort(place, kind="stable")]


def _known(names: list[str], source: Source) -> tuple[str, ...]:
    chosen = [same_name(name, source.class_names) for name in names]
    for name, meant in zip(names, chosen, strict=True):
        if meant is None:
            rule = f"hold classes of {source.name!r} ({', '.join(source.class_names)})"
            raise DataError(broken("data.classes", rule, name) + did_you_mean(name, source.class_names))
        if chosen.count(meant) > 1:
            raise DataError(broken("data.classes", "hold every class once", name))
    return tuple(name for name in chosen if name is not None)
