"""Validation images: part of every client's training images, for tuning and for choosing a round.

With a share s, a client of n training images gives round(s n) of them, and each of its cells (domain and class) of m images
gives floor(s m) or one more; the largest remainders get one more. With a number k, every cell gives k. A cell always keeps
one training image. Which images of a cell are given depends on the seed and on the images alone, not on their order, on the
other clients or on the method.
"""

from __future__ import annotations

import numpy as np

from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.data.seeded_streams import stream
from fedprompt.errors import DataError, broken


def with_validation(
    train: IndexLists,
    labels: np.ndarray,
    domains: np.ndarray,
    size: float,
    seed: int,
    groups: np.ndarray | None = None,
) -> tuple[IndexLists, IndexLists]:
    """The training images that are left to every client, and its validation images; both lists rise.

    `groups` has a number for every image of the source, such as that of a patient: images of one group are all training
    images or all validation images, at whatever clients they are.
    """
    owners, order = train.owners, stream(seed, "validation").permutation(len(labels))
    by_image = np.lexsort((train.values, owners))
    values, owners = train.values[by_image], owners[by_image]
    cells = Cells(values, owners, labels, domains, order)
    quota = cells.quota(size)
    alone = cells.rank < quota[cells.of]
    chosen = alone if groups is None else _grouped(cells, quota, groups[values], order[values])
    for client in np.flatnonzero(np.bincount(owners[chosen], minlength=len(train)) == 0)[:1].tolist():
        rule = "leave every client both training and validation images"
        found = (
            f"{train.sizes[client]} training images of {cells.kinds(client)} domain and class pairs at client {client}"
        )
        raise DataError(broken("data.validation", rule, found) + ": use fewer clients or more images")
    return tuple(
        IndexLists.of_sizes(values[part], np.bincount(owners[part], minlength=len(train))) for part in (~chosen, chosen)
    )  # type: ignore[return-value]


class Cells:
    """The training images of each client by domain and class."""

    def __init__(
        self, values: np.ndarray, owners: np.ndarray, labels: np.ndarray, domains: np.ndarray, order: np.ndarray
    ) -> None:
        classes, clients = int(labels.max(initial=0)) + 1, int(owners.max(initial=-1)) + 1
        kind = domains[values] * classes + labels[values]
        keys = owners * (int(kind.max(initial=0)) + 1) + kind
        found, self.of, self.sizes = np.unique(keys, return_inverse=True, return_counts=True)
        self.owners = found // (int(kind.max(initial=0)) + 1)
        self.clients = clients
        self.classes = owners * classes + labels[values]  # of every image, with its client
        by_cell = np.lexsort((order[values], self.of))
        starts = np.cumsum(self.sizes) - self.sizes
        self.rank = np.empty(len(values), dtype=np.int64)  # of every image, in the random order of its cell
        self.rank[by_cell] = np.arange(len(values)) - starts[self.of[by_cell]]
        self.first = order[values][
            by_cell[starts]
        ]  # where each cell's first image is in the random order: it breaks ties

    def kinds(self, client: int) -> int:
        return int((self.owners == client).sum())

    def quota(self, size: float) -> np.ndarray:
        """How many images each cell gives."""
        most = self.sizes - 1
        if isinstance(size, int):
            quota = np.minimum(size, most)
        else:
            exact = size * self.sizes
            quota = np.minimum(np.floor(exact).astype(np.int64), most)
            wanted = np.rint(size * np.bincount(self.owners, self.sizes, self.clients)).astype(np.int64)
            missing = wanted - np.bincount(self.owners, quota, self.clients).astype(np.int64)
            quota += self._first_of_each(-(exact - quota), quota < most) < missing[self.owners]
        empty = np.bincount(self.owners, quota, self.clients) == 0
        quota += empty[self.owners] & (self._first_of_each(-self.sizes, most > 0) == 0)
        bare = np.bincount(self.owners, quota, self.clients) == 0  # all its cells are single images
        several = np.bincount(self.owners, minlength=self.clients) > 1
        quota += (bare & several)[self.owners] & (self._first_of_each(self.first, most == 0) == 0)
        return quota

    def _first_of_each(self, key: np.ndarray, eligible: np.ndarray) -> np.ndarray:
        """The place of every eligible cell among those of its client, the smallest key first; others are never reached."""
        by_key = np.lexsort((self.first, key, ~eligible, self.owners))
        counts = np.bincount(self.owners, minlength=self.clients)
        starts = np.cumsum(counts) - counts
        place = np.empty(len(key), dtype=np.int64)
        place[by_key] = np.arange(len(key)) - starts[self.owners[by_key]]
        return np.where(eligible, place, np.iinfo(np.int64).max)


def _grouped(cells: Cells, quota: np.ndarray, groups: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Groups in random order; one is taken if it brings the cells closer to what they should give and no client loses a class.

    A client without any then gives its smallest group that leaves it a training image.
    """
    left = dict(enumerate(np.bincount(cells.classes).tolist()))
    owners = cells.owners[cells.of]
    images = dict(enumerate(np.bincount(owners).tolist()))
    missing, chosen = quota.astype(np.int64), np.zeros(len(groups), dtype=bool)
    by_order = np.argsort(order, kind="stable")
    names, firsts = np.unique(groups[by_order], return_index=True)
    members = [np.flatnonzero(groups == name) for name in names[np.argsort(firsts, kind="stable")]]

    def counted(places: np.ndarray, keys: np.ndarray) -> list[tuple[int, int]]:
        found, counts = np.unique(keys[places], return_counts=True)
        return list(zip(found.tolist(), counts.tolist(), strict=True))

    def take(places: np.ndarray) -> None:
        chosen[places] = True
        for keys, store in ((cells.classes, left), (owners, images)):
            for key, count in counted(places, keys):
                store[key] -= count
        for cell, count in counted(places, cells.of):
            missing[cell] -= count

    for places in members:
        closer = sum(abs(missing[cell]) - abs(missing[cell] - count) for cell, count in counted(places, cells.of)) > 0
        if closer and all(count < left[key] for key, count in counted(places, cells.classes)):
            take(places)
    for client in range(cells.clients):
        if not chosen[owners == client].any():
            for places in sorted((each for each in members if (owners[each] == client).any()), key=len):
                if all(count < images[key] for key, count in counted(places, owners)):
                    take(places)
                    break
    return chosen
