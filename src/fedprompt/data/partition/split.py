"""Which images train and which test, before any client is involved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedprompt.config import DataConfig
from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources.base import Source
from fedprompt.errors import DataError, broken


def train_and_test(source: Source, data: DataConfig, every_class: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and of test images: the source's own split or a stratified one, with the limits per cell.

    With `every_class`, a class without training images is refused; one site of several may lack some.
    """
    if source.splits is not None:
        train, test = np.flatnonzero(source.splits == "train"), np.flatnonzero(source.splits == "test")
        check_groups(source, "data.source", [source.splits == part for part in np.unique(source.splits)])
    elif source.groups is not None:
        train, test = grouped(source.labels, source.domains, source.groups, data.test_fraction, data.split_seed)
    else:
        train, test = stratified(source.labels, source.domains, data.test_fraction, data.split_seed)
    for name, part in (("train", train), ("test", test)):
        if not len(part):
            raise DataError(broken("data.source", f"have {name} images", f"none in {source.name!r}"))
    counts = np.bincount(source.labels[train], minlength=len(source.class_names))
    for label in np.flatnonzero(every_class & (counts == 0))[:1]:
        rule = "have training images of every class"
        raise DataError(broken("data.source", rule, f"none of {source.class_names[label]!r} in {source.name!r}"))
    return (
        per_cell(train, source, data.train_per_cell, data.split_seed, "train"),
        per_cell(test, source, data.test_per_cell, data.split_seed, "test"),
    )


def long_tail(train: np.ndarray, labels: np.ndarray, imbalance: float) -> np.ndarray:
    """Fewer and fewer training images from the first class to the last one.

    Class c of C keeps at most n I^(-c / (C - 1)) images, at least one, where n is the largest class and I the imbalance. They
    are taken evenly from the class's images, so from all of its domains.
    """
    counts = np.bincount(labels[train])
    last = max(1, len(counts) - 1)
    kept = []
    for label, count in enumerate(counts.tolist()):
        most = max(1, int(counts.max() * imbalance ** (-label / last) + 1e-9))
        images = train[labels[train] == label]
        kept.append(images[np.linspace(0, count, min(most, count), endpoint=False).astype(int)])
    return _sorted(kept)


def stratified(labels: np.ndarray, domains: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Reserve a fraction of every (domain, class) for testing: at least one image, and never the only one."""
    generator = stream(seed, "split")
    train, test = [], []
    for cell in cells(np.arange(len(labels)), labels, domains):
        aside = min(max(1, round(fraction * len(cell))), len(cell) - 1)
        mixed = generator.permutation(cell)
        test.append(mixed[:aside])
        train.append(mixed[aside:])
    return _sorted(train), _sorted(test)


def grouped(
    labels: np.ndarray, domains: np.ndarray, groups: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same with images of one group, such as a patient, on one side.

    Groups come in random order. One is reserved if that brings the cells closer to their fraction, and if every class keeps a
    training image; at least one is.
    """
    everything = np.arange(len(labels))
    cell_of = np.empty(len(labels), dtype=np.int64)
    missing = []
    for number, cell in enumerate(cells(everything, labels, domains)):
        cell_of[cell] = number
        missing.append(min(max(1, round(fraction * len(cell))), len(cell) - 1))
    left, short = np.bincount(labels), np.array(missing)
    by_group = np.argsort(groups, kind="stable")
    members = np.split(by_group, np.flatnonzero(np.diff(groups[by_group])) + 1)
    mixed = [members[place] for place in stream(seed, "split").permutation(len(members)).tolist()]
    is_test = np.zeros(len(labels), dtype=bool)
    for least in (1, -np.inf):  # how much closer the cells must come; if no group does that, the smallest one is taken
        for images in mixed if least == 1 else sorted(mixed, key=len):
            of_cells = np.bincount(cell_of[images], minlength=len(short))
            of_classes = np.bincount(labels[images], minlength=len(left))
            closer = np.abs(short).sum() - np.abs(short - of_cells).sum()
            if closer >= least and (of_classes < left)[of_classes > 0].all():
                is_test[images] = True
                left, short = left - of_classes, short - of_cells
                if least != 1:
                    break
        if is_test.any():
            break
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def check_groups(source: Source, field: str, parts: Sequence[np.ndarray]) -> None:
    """Raise if a group has images in two parts: training images, test images and the like."""
    if source.groups is None:
        return
    seen = [np.unique(source.groups[part]) for part in parts]
    torn = int((np.unique(np.concatenate(seen), return_counts=True)[1] > 1).sum())
    if torn:
        rule = "have all images of a group (a patient) in one part of the split"
        raise DataError(broken(field, rule, f"{torn} groups in several parts of {source.name!r}"))


def per_cell(indices: np.ndarray, source: Source, limit: int | None, seed: int, part: str) -> np.ndarray:
    """At most `limit` images of every (domain, class): the lowest ranks, or a seeded choice without ranks."""
    if limit is None:
        return indices
    order = source.ranks if source.ranks is not None else stream(seed, "cut", part).permutation(len(source))
    kept = [
        cell[np.argsort(order[cell], kind="stable")[:limit]] for cell in cells(indices, source.labels, source.domains)
    ]
    return _sorted(kept)


def cells(indices: np.ndarray, labels: np.ndarray, domains: np.ndarray) -> Iterator[np.ndarray]:
    """The indices of every (domain, class) that has any, in that order."""
    cell_of = domains[indices] * (int(labels.max(initial=0)) + 1) + labels[indices]
    ordered = indices[np.lexsort((indices, cell_of))]
    cell_of.sort()
    changes = np.flatnonzero(np.diff(cell_of)) + 1
    return (cell for cell in np.split(ordered, changes) if len(cell))


def _sorted(parts: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate(parts)) if parts else np.array([], dtype=np.int64)
