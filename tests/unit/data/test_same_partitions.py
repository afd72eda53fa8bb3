"""Partitions are published by their settings and seed: equal ones must hold the same images in every version."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.schemes import apportion, deal
from fedprompt.data.partition.split import cells
from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources.synthetic import TinySource

pytestmark = pytest.mark.unit
DRAWS = {"min_train": 1, "min_test": 1, "max_tries": 1000}

# settings, seed, and a digest of all names and lists, as the version before lists were kept in arrays made them
KNOWN: list[tuple[dict[str, Any], int, str]] = [
    ({"scheme": "domains", "clients": 4}, 0, "b79d90c50c8c7035"),
    ({"scheme": "domains", "clients": 6, "domains_per_client": 3}, 0, "989efb990996f08b"),
    ({"scheme": "domains", "clients": 6, "domains_per_client": 3}, 3, "816f699a94278deb"),
    ({"scheme": "classes", "clients": 4}, 0, "cc7dd73a7c85129a"),
    ({"scheme": "classes", "clients": 13, "classes_per_client": 2}, 0, "741d8adf3ed8efae"),
    ({"scheme": "classes", "clients": 13, "classes_per_client": 2}, 3, "bee855acf3385ab9"),
    ({"scheme": "classes", "clients": 30, "classes_per_client": 3}, 3, "a4d169c7996ce772"),
    ({"scheme": "dirichlet", "clients": 4}, 0, "ed940e339917081b"),
    ({"scheme": "dirichlet", "clients": 12, "alpha": 0.5, **DRAWS}, 3, "206a2a951c944a64"),
    ({"scheme": "dirichlet_in_domains", "clients": 8, "alpha": 1.0, **DRAWS}, 0, "87de3a23202ff5a8"),
    ({"scheme": "dirichlet_in_domains", "clients": 8, "alpha": 1.0, **DRAWS}, 3, "2a8f987db13642ed"),
    ({"scheme": "disjoint", "clients": 4}, 3, "280c6c54c711d921"),
    ({"scheme": "disjoint", "clients": 3, "shots": 3}, 0, "0cfeb24314d7d615"),
    ({"scheme": "disjoint", "clients": 4, "last_takes_rest": True}, 0, "0bb5f4e29ffcdf69"),
    ({"scheme": "label_subsets", "clients": 4}, 0, "237fab7eda40dcaa"),
    ({"scheme": "label_subsets", "clients": 7, "subsets": 5, "subsets_per_client": 2}, 3, "c144fea60448e7d5"),
    ({"scheme": "iid", "clients": 4}, 3, "f455a5f15fc807ed"),
    ({"scheme": "iid", "clients": 77}, 0, "7401257b6af0f115"),
]


@pytest.mark.parametrize(("partition", "seed", "digest"), KNOWN)
def test_a_partition_is_what_it_was(partition: dict[str, Any], seed: int, digest: str) -> None:
    manifest = make_manifest(TinySource(), DataConfig(source="tiny"), PartitionConfig(**partition), seed)
    held = [[client.name, client.train.tolist(), client.test.tolist()] for client in manifest.clients]
    assert hashlib.sha256(json.dumps(held).encode()).hexdigest()[:16] == digest


shares_and_debts = st.integers(1, 12).flatmap(
    lambda clients: st.tuples(
        st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=clients, max_size=clients).filter(any),
        st.lists(st.sampled_from([-0.5, 0.0, 0.0, 0.25]), min_size=clients, max_size=clients),
        st.permutations(range(clients)),
    )
)


@given(st.integers(0, 50), shares_and_debts)
def test_apportion_gives_the_rest_in_the_order_of_a_full_sort(count: int, given_shares: Any) -> None:
    weights, debts, turn = (np.array(values) for values in given_shares)
    share = weights / weights.sum()
    counts = np.floor(count * share + 1e-9).astype(np.int64)
    priority = np.where(share > 0, np.round(count * share - counts + debts, 9), -np.inf)
    counts[np.lexsort((turn, -priority))[: count - counts.sum()]] += 1
    assert apportion(count, share, debts, turn).tolist() == counts.tolist()


@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 3), st.booleans())
def test_deal_gives_what_a_list_for_every_client_would_hold(
    clients: int, images: int, seed: int, restart: bool
) -> None:
    random = np.random.default_rng(seed)
    labels, domains = random.integers(0, 3, images), random.integers(0, 2, images)
    rows = random.dirichlet(np.ones(clients), size=(2, 3))
    rows[1, 2] = 0  # a cell that nobody holds
    dealt, holders = deal(
        np.arange(images), labels, domains, clients, lambda d, c: rows[d, c], stream(seed, "t"), restart
    )
    generator, owed, latest = stream(seed, "t"), np.zeros(clients), -1
    turn = generator.permutation(clients)
    naive: list[list[int]] = [[] for _ in range(clients)]
    for cell in cells(np.arange(images), labels, domains):
        domain, label = domains[cell[0]], labels[cell[0]]
        owed = np.zeros(clients) if restart and domain != latest else owed
        latest = domain
        if not rows[domain, label].any():
            continue
        counts = apportion(len(cell), rows[domain, label], owed, turn)
        owed = owed + len(cell) * rows[domain, label] - counts
        pieces = np.split(generator.permutation(cell), np.cumsum(counts)[:-1])
        for client, piece in enumerate(pieces):
            naive[client] += piece.tolist()
        assert holders[domain, label].tolist() == np.flatnonzero(counts).tolist()
    assert [part.tolist() for part in dealt] == [sorted(part) for part in naive]
