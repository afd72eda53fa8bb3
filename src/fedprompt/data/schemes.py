"""The partitions: each a pure function of (labels, domains, settings, seed).

Every scheme only decides on *shares*: which part of a (domain, class) cell a client gets. One function, `deal`, makes
images of shares, for training and for testing alike, so both have the same distribution at a client by construction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedprompt.data.split import cells
from fedprompt.data.streams import stream
from fedprompt.errors import ConfigError, DataError, broken

Division = list[tuple[np.ndarray, np.ndarray]]  # training and test indices of every client


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
    held = np.zeros((count, clients))
    for client in range(clients):
        held[(client + np.arange(per_client)) % count, client] = 1
    shares = held / np.maximum(held.sum(axis=1, keepdims=True), 1)
    every_class = np.repeat(shares[:, None, :], len(supply.class_names), axis=1)
    return _both(supply, every_class, seed, "domains", restart_in_domains=True)


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
    quota = np.full(count, per_client * clients // count)
    quota[generator.permutation(count)[: per_client * clients % count]] += 1
    weights = np.zeros((count, clients))
    for client in range(clients):
        for _ in range(per_client):
            drawn = generator.choice(np.flatnonzero(quota == quota.max()))
            quota[drawn] -= 1
            weights[drawn, client] += generator.uniform(0.4, 0.6)
    shares = weights / weights.sum(axis=1, keepdims=True)
    return _by_class(supply, shares, seed, "classes")


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
        division = _by_class(supply, shares, seed, purpose)
        smallest = min(len(train) for train, _ in division), min(len(test) for _, test in division)
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
    division: Division = []
    for domain, name in enumerate(supply.domain_names):
        inside = supply.inside(domain)
        division += by_dirichlet(
            inside, clients // count, alpha, min_train, min_test, max_tries, seed, f"domain {name!r}"
        )
    return division


def by_disjoint_classes(
    supply: Supply, clients: int, shots: int | None, seed: int, last_takes_rest: bool = False
) -> Division:
    """Shuffled classes are cut into groups, one per client; `shots` training images of each class stay.

    Sizes of groups differ by one at most. With `last_takes_rest` they are round(C/N), and the last client has what is
    left (the rule of pFedMoAP: 37 classes over 10 clients are nine times 4 and once 1).
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
    return _by_class(supply, shares, seed, "disjoint")


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
    held = np.zeros((count, clients))
    for subset, group in enumerate(np.array_split(stream(seed, "label_subsets").permutation(count), subsets)):
        for client in range(clients):
            held[group, client] = (subset - client) % subsets < per_client
    return _by_class(supply, held / held.sum(axis=1, keepdims=True), seed, "label_subsets")


def evenly(supply: Supply, clients: int, seed: int) -> Division:
    """IID: every client gets the same part of every (domain, class)."""
    shares = np.full((len(supply.domain_names), len(supply.class_names), clients), 1 / clients)
    return _both(supply, shares, seed, "iid")


def deal(
    indices: np.ndarray,
    labels: np.ndarray,
    domains: np.ndarray,
    shares: np.ndarray,
    generator: np.random.Generator,
    restart_in_domains: bool = False,
) -> list[np.ndarray]:
    """Give out every (domain, class) cell by its shares (domains, classes, clients); a cell without a holder stays.

    Rounding is carried on: a client that got less than its share of one cell comes first in the next, so client sizes
    stay true even when cells are small. `restart_in_domains` carries inside a domain only, which keeps each domain even
    among its holders.
    """
    clients = shares.shape[2]
    turn = generator.permutation(clients)  # who comes first among equals
    owed = np.zeros(clients)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    domain = -1
    for cell in cells(indices, labels, domains):
        if restart_in_domains and domains[cell[0]] != domain:
            owed[:] = 0
        domain = int(domains[cell[0]])
        share = shares[domain, labels[cell[0]]]
        if not share.any():
            continue
        counts = apportion(len(cell), share, owed, turn)
        owed += len(cell) * share - counts
        pieces = np.split(generator.permutation(cell), np.cumsum(counts)[:-1])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [np.sort(np.concatenate([np.array([], dtype=np.int64), *part])) for part in parts]


def apportion(count: int, share: np.ndarray, owed: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Whole numbers that sum to `count`: floors of the shares, then one more where remainder and debt are largest."""
    exact = count * share
    counts = np.floor(exact + 1e-9).astype(np.int64)
    priority = np.where(share > 0, np.round(exact - counts + owed, 9), -np.inf)
    first = np.lexsort((turn, -priority))
    counts[first[: count - counts.sum()]] += 1
    return counts


def _both(supply: Supply, shares: np.ndarray, seed: int, purpose: str, restart_in_domains: bool = False) -> Division:
    """Deal training and test images by the same shares; a cell is tested only where it is trained on."""
    labels, domains = supply.labels, supply.domains
    train = deal(supply.train, labels, domains, shares, stream(seed, purpose, "train"), restart_in_domains)
    trained = np.zeros_like(shares)
    for client, part in enumerate(train):
        np.add.at(trained, (domains[part], labels[part], client), 1)
    masked = shares * (trained > 0)
    total = masked.sum(axis=2, keepdims=True)
    masked = np.where(
        total > 0, masked / np.where(total > 0, total, 1), shares
    )  # a cell without training images: as planned
    test = deal(supply.test, labels, domains, masked, stream(seed, purpose, "test"), restart_in_domains)
    return list(zip(train, test, strict=True))


def _by_class(supply: Supply, shares: np.ndarray, seed: int, purpose: str) -> Division:
    """Deal whole classes by shares (classes, clients), whatever the domain: fewer, larger cells are rounded less."""
    return _both(replace(supply, domains=np.zeros_like(supply.domains)), shares[None], seed, purpose)


def _few(supply: Supply, shots: int, seed: int) -> np.ndarray:
    """`shots` training images of each class, whatever their domain."""
    kept = []
    for label, name in enumerate(supply.class_names):
        mine = supply.train[supply.labels[supply.train] == label]
        if len(mine) < shots:
            raise DataError(
                broken("partition.shots", f"be at most the {len(mine)} training images of class {name!r}", shots)
            )
        kept.append(stream(seed, "shots", label).choice(mine, size=shots, replace=False))
    return np.sort(np.concatenate(kept))
