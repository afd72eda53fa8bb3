"""From settings to a manifest: split, divide among clients, check the sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.config.plugin_options import arguments
from fedprompt.config.registries import PARTITIONS
from fedprompt.data.partition.client_names import NumberedNames
from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.data.partition.manifest import Clients, Manifest
from fedprompt.data.partition.schemes import (
    Division,
    Pair,
    Supply,
    by_classes,
    by_dirichlet,
    by_dirichlet_in_domains,
    by_disjoint_classes,
    by_domains,
    by_label_subsets,
    evenly,
)
from fedprompt.data.partition.split import check_groups, long_tail, train_and_test
from fedprompt.data.partition.validation import with_validation
from fedprompt.data.sources.base import Source
from fedprompt.errors import ConfigError, ContractError, DataError, broken, did_you_mean, same_name

Scheme = Callable[..., Sequence[Pair]]
Given = TypeVar("Given", bound=Scheme)


def register_partition(name: str) -> Callable[[Given], Given]:
    """Make a way to divide images known under a name: `partition: {scheme: ...}` in a config.

    It is called with a `Supply`, the number of clients and a seed, and gives the training and test indices of every client.
    Keyword-only parameters are its settings: those of the section come from there (`alpha`, `min_train`), all others from
    its `options`.
    """
    return PARTITIONS.registrar(name)


def make_manifest(source: Source, data: DataConfig, partition: PartitionConfig, seed: int) -> Manifest:
    """Divide the images of a source among clients; equal arguments give equal manifests.

    Scheme `manifest` reads a file instead, which defines the number of clients and the split; if it has no validation
    images, `data.validation` chooses some.
    """
    if partition.scheme == "manifest":
        if partition.manifest is None:
            raise ConfigError(broken("partition.manifest", "name a JSON file for scheme 'manifest'", None))
        manifest = Manifest.load(partition.manifest)
        manifest.check(source)
        _check_made_with(manifest, data)
        check_groups(source, "partition.manifest", [lists.values for lists in manifest.clients.parts.values()])
        if data.validation is None or manifest.clients.validation is not None:
            return manifest
        held = manifest.clients
        made_by = {**manifest.scheme, "validation": {"size": data.validation, "seed": data.split_seed}}
        return replace(manifest, clients=_clients(source, data, held.names, held.train, held.test), scheme=made_by)
    train, test = train_and_test(source, data)
    if data.imbalance is not None:
        train = long_tail(train, source.labels, data.imbalance)
    if partition.clients > len(train):
        raise ConfigError(
            broken("partition.clients", f"be at most the {len(train)} training images", partition.clients)
        )
    supply = Supply(source.labels, source.domains, train, test, source.class_names, source.domain_names)
    unseen = None
    if data.unseen_domain is not None:
        supply, unseen = without_domain(supply, data.unseen_domain)
    seed = partition.seed if partition.seed is not None else seed
    division = divide(supply, partition, seed)
    if unseen is not None:
        division = replace(division, test=IndexLists.of([unseen] * partition.clients))
    names = NumberedNames(partition.clients)
    _check_sizes(division, names, partition)
    return Manifest(
        source_name=source.name,
        source_fingerprint=source.fingerprint,
        class_names=source.class_names,
        domain_names=source.domain_names,
        clients=_clients(source, data, names, division.train, division.test),
        scheme={
            **partition.model_dump(mode="json", exclude={"manifest"}),
            "seed": seed,
            "data": data.model_dump(mode="json", exclude={"source", "other_set", "format", "resize"}),
        },
    )


def _check_made_with(manifest: Manifest, data: DataConfig) -> None:
    """A manifest decides which images train: a config that asks for other ones would name what it does not do."""
    made_with = manifest.scheme.get("data")
    for name in ("unseen_domain", "imbalance"):
        value = getattr(data, name)
        if value is not None and (not isinstance(made_with, dict) or made_with.get(name) != value):
            rule = "be absent with a partition.manifest that was made without it"
            raise ConfigError(broken(f"data.{name}", rule, value))


def without_domain(supply: Supply, name: str) -> tuple[Supply, np.ndarray]:
    """The images of the other domains, and the test images of this one."""
    found = same_name(name, supply.domain_names)
    if len(supply.domain_names) == 1:
        raise DataError(broken("data.unseen_domain", "be absent for a set without several domains", name))
    if found is None:
        rule = f"be one of several domains ({', '.join(supply.domain_names)})"
        raise DataError(broken("data.unseen_domain", rule, name) + did_you_mean(name, supply.domain_names))
    number = supply.domain_names.index(found)
    unseen = supply.test[supply.domains[supply.test] == number]
    if not len(unseen):
        raise DataError(broken("data.unseen_domain", "be a domain with test images", name))
    rest = replace(
        supply,
        domains=supply.domains - (supply.domains > number),
        train=supply.train[supply.domains[supply.train] != number],
        test=supply.test[supply.domains[supply.test] != number],
        domain_names=tuple(each for each in supply.domain_names if each != found),
    )
    return rest, unseen


def _clients(source: Source, data: DataConfig, names: Sequence[str], train: IndexLists, test: IndexLists) -> Clients:
    """All clients, with some of their training images for validation where `data.validation` says so."""
    if data.validation is None:
        return Clients(names, train, test)
    images = source.labels, source.domains
    left, validation = with_validation(train, *images, data.validation, data.split_seed, source.groups)
    return Clients(names, left, test, validation)


def divide(supply: Supply, partition: PartitionConfig, seed: int) -> Division:
    """Training and test indices of every client under `partition.scheme`."""
    found = scheme(partition)(supply, partition.clients, seed)
    return found if isinstance(found, Division) else _checked(found, supply, partition)


def scheme(partition: PartitionConfig) -> Scheme:
    """The function a config asks for."""
    found: Scheme = PARTITIONS.get(partition.scheme)
    return partial(found, **arguments(partition, "partition", partition.scheme, found))


@register_partition("domains")
def _domains(supply: Supply, clients: int, seed: int, *, domains_per_client: int) -> Division:
    return by_domains(supply, clients, domains_per_client, seed)


@register_partition("classes")
def _classes(supply: Supply, clients: int, seed: int, *, classes_per_client: int) -> Division:
    return by_classes(supply, clients, classes_per_client, seed)


@register_partition("dirichlet")
def _dirichlet(
    supply: Supply, clients: int, seed: int, *, alpha: float, min_train: int, min_test: int, max_tries: int
) -> Division:
    return by_dirichlet(supply, clients, alpha, min_train, min_test, max_tries, seed)


@register_partition("dirichlet_in_domains")
def _dirichlet_in_domains(
    supply: Supply, clients: int, seed: int, *, alpha: float, min_train: int, min_test: int, max_tries: int
) -> Division:
    return by_dirichlet_in_domains(supply, clients, alpha, min_train, min_test, max_tries, seed)


@register_partition("disjoint")
def _disjoint(supply: Supply, clients: int, seed: int, *, shots: int | None, last_takes_rest: bool) -> Division:
    return by_disjoint_classes(supply, clients, shots, seed, last_takes_rest)


@register_partition("label_subsets")
def _label_subsets(supply: Supply, clients: int, seed: int, *, subsets: int, subsets_per_client: int) -> Division:
    return by_label_subsets(supply, clients, subsets, subsets_per_client, seed)


register_partition("iid")(evenly)


def _checked(found: Sequence[Pair], supply: Supply, partition: PartitionConfig) -> Division:
    """What a scheme of others gave, if every client got images that there are, and none of them another's."""
    field = f"partition.scheme {partition.scheme!r}"
    if len(found) != partition.clients:
        raise ContractError(broken(field, f"give images to {partition.clients} clients", len(found)))
    lists = [IndexLists.of(np.sort(np.asarray(pair[side])) for pair in found) for side in (0, 1)]
    for what, given, there in zip(("training", "test"), lists, (supply.train, supply.test), strict=True):
        values, times = np.unique(given.values, return_counts=True)
        for index in np.setdiff1d(values, there)[:1].tolist():
            raise ContractError(broken(field, f"give out {what} images that there are", index))
        for index in values[times > 1][:1].tolist():
            raise ContractError(broken(field, f"give every {what} image to one client", index))
    return Division(*lists)


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
