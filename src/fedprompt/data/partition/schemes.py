"""The partitions: each a pure function of (labels, domains, settings, seed).

Every scheme only computes *shares*: which part of a (domain, class) cell a client gets. One function, `deal`, assigns
training and test images by these shares, so both have the same distribution at a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.data.partition.split import cells
from fedprompt.data.seeded_streams import stream
from fedprompt.errors import ConfigError, DataError, broken

Shares = Callable[[int, int], np.ndarray]  # the part of a (domain, class) that each client gets; made row by row
Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Division(Sequence[Pair]):
    """Training and test indices of every client."""

    train: IndexLists
    test: IndexLists

    def __len__(self) -> int:
        return len(self.train)

    @overload
    def __getitem__(self, place: int) -> Pair: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Pair, ...]: ...
    def __getitem__(self, place: int | slice) -> Pair | tuple[Pair, ...]:
        if isinstance(place, slice):
            return tuple(zip(self.train[place], self.test[place], strict=True))
        return self.train[place], self.test[place]


@dataclass(frozen=True)
class Supply:
    """The images to divide: labels and domains of the whole source, and which of its indices train and test."""

    labels: np.ndarray
    domains: np.ndarray
    train: np.ndarray
    test: np.ndarray
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]

    def inside(self, domain: int) -> Supply:
        """Only the images of one domain."""
        train = self.train[self.domains[self.train] == domain]
        return replace(self, train=train, test=self.test[self.domains[self.test] == domain])


def by_domains(supply: Supply, clients: int, per_client: int, seed: int) -> Division:
    """Client k holds domains k .. k+m-1 (mod D); each domain is divided evenly, class by class, among its holders."""
    count = len(supply.domain_names)
    if per_client > count:
        raise ConfigError(
            broken("partition.domains_per_client", f"be at most the {count} domains of the data", per_client)
        )
    everyone = np.arange(clients)

    def shares(domain: int, label: int) -> np.ndarray:
        return _evenly_among((domain - everyone) % count < per_client)

    return _both(supply, clients, shares, seed, "domains", restart_in_domains=True)


def by_classes(supply: Supply, clients: int, per_client: int, seed: int) -> Division:
    """At most s classes per client (the quota rule of FedRoD and SGPT).

    Class c can be drawn s*N/C times. Clients draw s times from the classes with the largest remaining quota; a class
    may come twice, hence "at most". Every draw is worth U(0.4, 0.6), normalised over the draws of the class. When s*N
    is no multiple of C, the rest of the quota goes to classes drawn at random.
    """
    count = len(supply.class_names)
    if per_client > count:
        raise ConfigError(
            broken("partition.classes_per_client", f"be at most the {count} classes of the data", per_client)
        )
    if per_client * clients < count:
        rule = f"be at least {-(-count // clients)}, so that {clients} clients can hold all {count} classes"
        raise ConfigError(broken("partition.classes_per_client", rule, per_client))
    generator = stream(seed, "classes")
    drawn, worth = np.empty(clients * per_client, dtype=np.int64), np.empty(clients * per_client)
    largest = sorted(generator.permutation(count)[: per_client * clients % count].tolist())
    for place in range(len(drawn)):
        largest = largest or list(range(count))  # all have the same quota again
        drawn[place] = largest.pop(generator.integers(len(largest)))
        worth[place] = generator.uniform(0.4, 0.6)
    holders = np.arange(clients).repeat(per_client)

    def shares(label: int) -> np.ndarray:
        mine = drawn == label
        weights = np.bincount(holders[mine], worth[mine], clients)
        return weights / weights.sum()

    return _by_class(supply, clients, shares, seed, "classes")


def by_dirichlet(
    supply: Supply,
    clients: int,
    alpha: float,
    min_train: int,
    min_test: int,
    max_tries: int,
    seed: int,
    where: str = "data",
) -> Division:
    """Dirichlet(alpha) divides each class over the clients; drawn again until all clients have the minimum sizes."""
    counts = np.bincount(supply.labels[supply.train], minlength=len(supply.class_names))
    best = (-1, -1)
    for attempt in range(max_tries):
        purpose = f"dirichlet/{where}/{attempt}"
        shares = dirichlet_shares(counts, clients, alpha, stream(seed, purpose))
        division = _by_class(supply, clients, shares.__getitem__, seed, purpose)
        smallest = int(division.train.sizes.min()), int(division.test.sizes.min())
        if smallest[0] >= min_train and smallest[1] >= min_test:
            return division
        best = max(best, smallest, key=lambda pair: min(pair[0] - min_train, pair[1] - min_test))
    raise DataError(
        f"partition.min_train {min_train} and partition.min_test {min_test} must be reached within partition.max_tries "
        f"{max_tries} draws of Dirichlet({alpha}) over {clients} clients in {where}; in the best draw the smallest "
        f"client has {best[0]} training and the smallest {best[1]} test images: raise partition.alpha or "
        "partition.max_tries, or lower partition.clients or the minimum sizes"
    )


def dirichlet_shares(counts: np.ndarray, clients: int, alpha: float, generator: np.random.Generator) -> np.ndarray:
    """Shares (classes, clients). A client that already has an even part of all images gets no more; others share it."""
    capacity = counts.sum() / clients
    held = np.zeros(clients)
    shares = np.zeros((len(counts), clients))
    for label, count in enumerate(counts):
        open_to = held < capacity
        drawn = np.nan_to_num(generator.dirichlet(np.full(clients, alpha))) * open_to
        if not drawn.sum() > 0:  # a small alpha can give everything to clients that are full
            drawn = (open_to if open_to.any() else np.ones(clients)).astype(float)
        shares[label] = drawn / drawn.sum()
        held += shares[label] * count
    return shares


def by_dirichlet_in_domains(
    supply: Supply, clients: int, alpha: float, min_train: int, min_test: int, max_tries: int, seed: int
) -> Division:
    """Every domain has clients/D clients of its own, and Dirichlet(alpha) divides its classes among them."""
    count = len(supply.domain_names)
    if clients % count:
        raise ConfigError(broken("partition.clients", f"be a multiple of the {count} domains of the data", clients))
    found = [
        by_dirichlet(
            supply.inside(domain), clients // count, alpha, min_train, min_test, max_tries, seed, f"domain {name!r}"
        )
        for domain, name in enumerate(supply.domain_names)
    ]
    parts = [division.train for division in found], [division.test for division in found]
    return Division(*map(IndexLists.joined, parts))


def by_disjoint_classes(
    supply: Supply, clients: int, shots: int | None, seed: int, last_takes_rest: bool = False
) -> Division:
    """Shuffled classes are cut into groups, one per client; `shots` training images of each class stay.

    Sizes of groups differ by one at most. With `last_takes_rest` they are round(C/N), and the last client has the
    rest (the rule of pFedMoAP: 37 classes over 10 clients are nine times 4 and once 1).
    """
    count = len(supply.class_names)
    if clients > count:
        raise ConfigError(broken("partition.clients", f"be at most the {count} classes of the data", clients))
    mixed = stream(seed, "disjoint").permutation(count)
    each = round(count / clients)
    if last_takes_rest and each * (clients - 1) >= count:
        rule = f"leave a class to the last client ({clients - 1} groups of {each} take all {count})"
        raise ConfigError(broken("partition.last_takes_rest", rule, last_takes_rest))
    groups = np.split(mixed, each * np.arange(1, clients)) if last_takes_rest else np.array_split(mixed, clients)
    shares = np.zeros((count, clients))
    for client, group in enumerate(groups):
        shares[group, client] = 1
    if shots is not None:
        supply = replace(supply, train=_few(supply, shots, seed))
    return _by_class(supply, clients, shares.__getitem__, seed, "disjoint")


def by_label_subsets(supply: Supply, clients: int, subsets: int, per_client: int, seed: int) -> Division:
    """Shuffled classes are cut into subsets whose sizes differ by one at most. Client k holds subsets k .. k+p-1 (mod
    `subsets`); each class is divided evenly among the clients that hold it.
    """
    count = len(supply.class_names)
    if subsets > count:
        raise ConfigError(broken("partition.subsets", f"be at most the {count} classes of the data", subsets))
    if per_client > subsets:
        raise ConfigError(broken("partition.subsets_per_client", f"be at most partition.subsets {subsets}", per_client))
    if clients + per_client - 1 < subsets:
        rule = f"be at least {subsets - per_client + 1}, so that each of the {subsets} label subsets has a holder"
        raise ConfigError(broken("partition.clients", rule, clients))
    everyone, subset_of = np.arange(clients), np.empty(count, dtype=np.int64)
    for subset, group in enumerate(np.array_split(stream(seed, "label_subsets").permutation(count), subsets)):
        subset_of[group] = subset

    def shares(label: int) -> np.ndarray:
        return _evenly_among((subset_of[label] - everyone) % subsets < per_client)

    return _by_class(supply, clients, shares, seed, "label_subsets")


def evenly(supply: Supply, clients: int, seed: int) -> Division:
    """IID: every client gets the same part of every (domain, class)."""
    share = np.full(clients, 1 / clients)
    return _both(supply, clients, lambda domain, label: share, seed, "iid")


def deal(
    indices: np.ndarray,
    labels: np.ndarray,
    domains: np.ndarray,
    clients: int,
    shares: Shares,
    generator: np.random.Generator,
    restart_in_domains: bool = False,
) -> tuple[IndexLists, dict[tuple[int, int], np.ndarray]]:
    """Assign every (domain, class) cell by its shares; a cell without a holder is left out. Also: who got any of each
    cell.

    Rounding errors are carried over: a client that got less than its share of one cell comes first in the next, so
    client sizes are right even for small cells. `restart_in_domains` carries inside a domain only, which keeps each
    domain even among its holders.
    """
    turn = generator.permutation(clients)  # who comes first among equals
    owed, everyone, sizes = np.zeros(clients), np.arange(clients), np.zeros(clients, dtype=np.int64)
    above = int(indices.max(initial=0)) + 1
    assigned = np.empty(len(indices), dtype=np.int64)  # owner * above + index: one array, sorted in place
    holders: dict[tuple[int, int], np.ndarray] = {}
    latest = -1
    for cell in cells(indices, labels, domains):
        domain, label = int(domains[cell[0]]), int(labels[cell[0]])
        if restart_in_domains and domain != latest:
            owed[:] = 0
        latest = domain
        share = shares(domain, label)
        if not share.any():
            continue
        counts = apportion(len(cell), share, owed, turn)
        owed += len(cell) * share - counts
        filled = int(sizes.sum())
        assigned[filled : filled + len(cell)] = everyone.repeat(counts) * above + generator.permutation(cell)
        sizes += counts
        holders[domain, label] = np.flatnonzero(counts)
    assigned = assigned[: sizes.sum()]
    assigned.sort()
    assigned %= above
    return IndexLists.of_sizes(assigned, sizes), holders


def apportion(count: int, share: np.ndarray, owed: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Whole numbers that sum to `count`: floors of the shares, then one more where remainder and debt are largest."""
    exact = count * share
    counts = np.floor(exact + 1e-9).astype(np.int64)
    priority = np.where(share > 0, np.round(exact - counts + owed, 9), -np.inf)
    left = count - int(counts.sum())
    if left:
        last = np.partition(priority, -left)[-left]  # the smallest value that still gets one more
        ties = np.flatnonzero(priority == last)
        counts[priority > last] += 1
        counts[ties[np.argsort(turn[ties])[: left - (priority > last).sum()]]] += 1
    return counts


def _both(
    supply: Supply, clients: int, shares: Shares, seed: int, purpose: str, restart_in_domains: bool = False
) -> Division:
    """Assign training and test images by the same shares; a cell is tested only by clients that train on it."""
    labels, domains = supply.labels, supply.domains
    generator = stream(seed, purpose, "train")
    train, holders = deal(supply.train, labels, domains, clients, shares, generator, restart_in_domains)

    def trained(domain: int, label: int) -> np.ndarray:
        share, held = shares(domain, label), holders.get((domain, label))
        if held is None:  # a cell without training images: as planned
            return share
        masked = np.zeros(clients)
        masked[held] = share[held]
        return masked / masked.sum()

    generator = stream(seed, purpose, "test")
    test, _ = deal(supply.test, labels, domains, clients, trained, generator, restart_in_domains)
    return Division(train, test)


def _by_class(supply: Supply, clients: int, shares: Callable[[int], np.ndarray], seed: int, purpose: str) -> Division:
    """Assign whole classes by their shares, ignoring domains: fewer, larger cells have smaller rounding errors."""
    anywhere = replace(supply, domains=np.zeros_like(supply.domains))
    return _both(anywhere, clients, lambda domain, label: shares(label), seed, purpose)


def _evenly_among(holders: np.ndarray) -> np.ndarray:
    """The same share for every holder."""
    return holders / max(holders.sum(), 1)


def _few(supply: Supply, shots: int, seed: int) -> np.ndarray:
    """`shots` training images of each class, ignoring domains."""
    kept = []
    for label, name in enumerate(supply.class_names):
        mine = supply.train[supply.labels[supply.train] == label]
        if len(mine) < shots:
            raise DataError(
                broken("partition.shots", f"be at most the {len(mine)} training images of class {name!r}", shots)
            )
        kept.append(stream(seed, "shots", label).choice(mine, size=shots, replace=False))
    return np.sort(np.concatenate(kept))
