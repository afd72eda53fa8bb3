"""From settings to a manifest: split, divide among clients, check the sizes."""

from __future__ import annotations

import numpy as np

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.base import Source
from fedprompt.data.client_names import NumberedNames
from fedprompt.data.manifest import Clients, Manifest
from fedprompt.data.schemes import (
    Division,
    Supply,
    by_classes,
    by_dirichlet,
    by_dirichlet_in_domains,
    by_disjoint_classes,
    by_domains,
    by_label_subsets,
    evenly,
)
from fedprompt.data.split import train_and_test
from fedprompt.errors import ConfigError, DataError, broken


def make_manifest(source: Source, data: DataConfig, partition: PartitionConfig, seed: int) -> Manifest:
    """Divide the images of a source among clients; equal arguments give equal manifests.

    Scheme `manifest` reads a file instead, which then decides on the number of clients and on the split.
    """
    if partition.scheme == "manifest":
        if partition.manifest is None:
            raise ConfigError(broken("partition.manifest", "name a JSON file for scheme 'manifest'", None))
        manifest = Manifest.load(partition.manifest)
        manifest.check(source)
        return manifest
    train, test = train_and_test(source, data)
    if partition.clients > len(train):
        raise ConfigError(
            broken("partition.clients", f"be at most the {len(train)} training images", partition.clients)
        )
    supply = Supply(source.labels, source.domains, train, test, source.class_names, source.domain_names)
    seed = partition.seed if partition.seed is not None else seed
    division = divide(supply, partition, seed)
    names = NumberedNames(partition.clients)
    _check_sizes(division, names, partition)
    return Manifest(
        source_name=source.name,
        source_fingerprint=source.fingerprint,
        class_names=source.class_names,
        domain_names=source.domain_names,
        clients=Clients(names, division.train, division.test),
        scheme={
            **partition.model_dump(mode="json", exclude={"manifest"}),
            "seed": seed,
            "data": data.model_dump(mode="json", exclude={"source", "format", "resize"}),
        },
    )


def divide(supply: Supply, partition: PartitionConfig, seed: int) -> Division:
    """Training and test indices of every client under `partition.scheme`."""
    clients = partition.clients
    draws = (partition.alpha, partition.min_train, partition.min_test, partition.max_tries)
    match partition.scheme:
        case "domains":
            return by_domains(supply, clients, partition.domains_per_client, seed)
        case "classes":
            return by_classes(supply, clients, partition.classes_per_client, seed)
        case "dirichlet":
            return by_dirichlet(supply, clients, *draws, seed)
        case "dirichlet_in_domains":
            return by_dirichlet_in_domains(supply, clients, *draws, seed)
        case "disjoint":
            return by_disjoint_classes(supply, clients, partition.shots, seed, partition.last_takes_rest)
        case "label_subsets":
            return by_label_subsets(supply, clients, partition.subsets, partition.subsets_per_client, seed)
        case "iid":
            return evenly(supply, clients, seed)
    raise ConfigError(broken("partition.scheme", "divide images", partition.scheme))


def _check_sizes(division: Division, names: NumberedNames, partition: PartitionConfig) -> None:
    short = (division.train.sizes < partition.min_train) | (division.test.sizes < partition.min_test)
    for client in np.flatnonzero(short)[:1].tolist():
        train, test = division[client]
        for field, kind, size, minimum in (
            ("partition.min_train", "training", len(train), partition.min_train),
            ("partition.min_test", "test", len(test), partition.min_test),
        ):
            if size < minimum:
                rule = f"be met by every client ({minimum} {kind} images)"
                found = f"{size} at {names[client]}"
                raise DataError(broken(field, rule, found) + ": use fewer clients or more images")
