"""Who gets which images: facts about every scheme, on arrays and on the tiny set."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.schemes import (
    Division,
    Supply,
    apportion,
    by_classes,
    by_dirichlet,
    by_dirichlet_in_domains,
    by_disjoint_classes,
    by_domains,
    by_label_subsets,
    dirichlet_shares,
    evenly,
)
from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import ConfigError, DataError

pytestmark = pytest.mark.unit
SCHEMES = ("domains", "classes", "dirichlet", "dirichlet_in_domains", "disjoint", "label_subsets", "iid")


def supply(domains: int, classes: int, train: int, test: int) -> Supply:
    """`train` and `test` images of every (domain, class)."""
    cells = np.arange(domains * classes).repeat(train + test)
    within = np.tile(np.arange(train + test), domains * classes)
    return Supply(
        labels=cells % classes,
        domains=cells // classes,
        train=np.flatnonzero(within < train),
        test=np.flatnonzero(within >= train),
        class_names=tuple(f"class{label}" for label in range(classes)),
        domain_names=tuple(f"domain{domain}" for domain in range(domains)),
    )


def counts(division: Division, values: np.ndarray, size: int, part: int = 0) -> np.ndarray:
    """Images of every client and label (or domain)."""
    return np.stack([np.bincount(values[client[part]], minlength=size) for client in division])


def assert_divides_exactly(division: Division, given: Supply) -> None:
    """Every image goes to one client, training images to training."""
    assert sorted(np.concatenate([train for train, _ in division])) == given.train.tolist()
    assert sorted(np.concatenate([test for _, test in division])) == given.test.tolist()


shapes = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9), st.integers(1, 5))


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 12), st.integers(0, 3), st.data())
def test_domains_are_circulant_and_even_among_their_holders(shape, clients, seed, data):
    images = supply(*shape)
    domain_count = shape[0]
    per_client = data.draw(st.integers(1, domain_count))
    division = by_domains(images, clients, per_client, seed)
    held = np.zeros((clients, domain_count), dtype=bool)
    for client in range(clients):
        held[client, [(client + step) % domain_count for step in range(per_client)]] = True
    sizes = counts(division, images.domains, domain_count)
    assert not sizes[~held].any()
    for domain in np.flatnonzero(held.any(axis=0)):
        mine = sizes[held[:, domain], domain]
        assert mine.sum() == shape[1] * shape[2]
        assert mine.max() - mine.min() <= 1


def test_domains_with_one_client_per_domain_gives_each_client_one_whole_domain():
    images = supply(6, 10, 4, 2)
    division = by_domains(images, 6, 1, seed=0)
    assert counts(division, images.domains, 6).tolist() == (40 * np.eye(6, dtype=int)).tolist()
    assert_divides_exactly(division, images)


def test_domains_keeps_client_sizes_constant_over_m():
    images = supply(6, 10, 12, 6)
    for per_client in range(1, 7):
        assert {len(train) for train, _ in by_domains(images, 6, per_client, seed=1)} == {120}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 3), st.data())
def test_quota_rule_gives_at_most_s_classes_and_leaves_no_class_out(classes, clients, seed, data):
    per_client = data.draw(st.integers(-(-classes // clients), max(classes, -(-classes // clients))))
    if per_client > classes:
        return
    images = supply(1, classes, 60, 30)
    division = by_classes(images, clients, per_client, seed)
    held = counts(division, images.labels, classes) > 0
    assert held.sum(axis=1).max() <= per_client
    assert held.any(axis=0).all()
    assert_divides_exactly(division, images)


def test_quota_rule_gives_every_class_to_s_times_n_over_c_clients():
    images = supply(1, 10, 100, 50)
    division = by_classes(images, 20, 2, seed=0)
    holders = (counts(division, images.labels, 10) > 0).sum(axis=0)
    assert holders.max() <= 4
    assert (holders == 4).sum() >= 7  # a client may draw a class twice, so a few have a holder less


def test_quota_shares_stay_between_the_extremes_of_the_uniform_draws():
    images = supply(1, 5, 1000, 100)
    division = by_classes(images, 5, 2, seed=3)
    sizes = counts(division, images.labels, 5)
    once = [row[row > 0] for row in sizes.T if (row > 0).sum() == 2]
    assert once
    for row in once:
        assert row.min() >= 1000 * 0.4 / 1.0 - 1
        assert row.max() <= 1000 * 0.6 / 1.0 + 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.floats(0.05, 10), st.integers(0, 5))
def test_dirichlet_divides_every_image_exactly_once(clients, alpha, seed):
    images = supply(2, 4, 30, 15)
    division = by_dirichlet(images, clients, alpha, 1, 1, 1000, seed)
    assert_divides_exactly(division, images)
    assert min(len(part) for client in division for part in client) >= 1


def test_dirichlet_closes_a_client_that_has_an_even_part_already():
    shares = dirichlet_shares(np.full(50, 100), 5, 0.05, stream(0, "test"))
    held = np.zeros(5)
    for share in shares:
        assert not share[held >= 1000].any()
        assert share.sum() == pytest.approx(1)
        held += 100 * share
    assert held.max() < 1000 + 100


def test_dirichlet_with_large_alpha_is_nearly_even():
    images = supply(1, 4, 100, 50)
    sizes = counts(by_dirichlet(images, 5, 1e6, 1, 1, 1, seed=0), images.labels, 4)
    assert abs(sizes - 20).max() <= 1


def test_dirichlet_error_names_the_settings_and_the_smallest_sizes():
    images = supply(1, 2, 10, 5)
    with pytest.raises(DataError) as caught:
        by_dirichlet(images, 4, 0.3, 6, 1, 7, seed=0)
    message = str(caught.value)
    assert "partition.min_train 6" in message
    assert "partition.max_tries 7 draws" in message
    assert "smallest client has" in message


def test_dirichlet_in_domains_keeps_every_client_inside_one_domain():
    images = supply(3, 5, 20, 10)
    division = by_dirichlet_in_domains(images, 6, 0.5, 2, 1, 100, seed=0)
    held = counts(division, images.domains, 3) > 0
    assert held.tolist() == np.eye(3, dtype=bool).repeat(2, axis=0).tolist()
    assert_divides_exactly(division, images)


def test_dirichlet_in_domains_draws_anew_for_every_domain():
    images = supply(2, 6, 50, 20)
    sizes = counts(by_dirichlet_in_domains(images, 4, 0.5, 1, 1, 100, seed=0), images.labels, 6)
    assert sizes[:2].tolist() != sizes[2:].tolist()


def test_dirichlet_in_domains_refuses_clients_that_are_no_multiple_of_the_domains():
    with pytest.raises(ConfigError, match=r"partition\.clients must be a multiple of the 3 domains of the data, got 4"):
        by_dirichlet_in_domains(supply(3, 2, 5, 5), 4, 0.5, 1, 1, 10, seed=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 5), st.data())
def test_disjoint_groups_differ_by_at_most_one_class_and_never_overlap(classes, seed, data):
    clients = data.draw(st.integers(1, classes))
    images = supply(1, classes, 3, 2)
    division = by_disjoint_classes(images, clients, None, seed)
    held = counts(division, images.labels, classes) > 0
    assert (held.sum(axis=0) == 1).all()
    assert held.sum(axis=1).max() - held.sum(axis=1).min() <= 1
    assert_divides_exactly(division, images)


def test_disjoint_keeps_the_shots_per_class_and_all_test_images():
    images = supply(2, 37, 8, 3)
    division = by_disjoint_classes(images, 10, 4, seed=0)
    assert (counts(division, images.labels, 37).sum(axis=0) == 4).all()
    assert (counts(division, images.labels, 37, part=1).sum(axis=0) == 6).all()


@pytest.mark.parametrize(
    ("classes", "each", "last"), [(37, 4, 1), (47, 5, 2), (102, 10, 12), (101, 10, 11), (100, 10, 10)]
)
def test_the_last_client_takes_the_rest_of_the_classes_as_pfedmoap_has_it(classes, each, last):
    images = supply(1, classes, 3, 2)
    division = by_disjoint_classes(images, 10, None, seed=0, last_takes_rest=True)
    held = counts(division, images.labels, classes) > 0
    assert held.sum(axis=1).tolist() == [each] * 9 + [last]
    assert (held == (counts(division, images.labels, classes, part=1) > 0)).all()
    assert_divides_exactly(division, images)


def test_a_last_client_without_a_class_is_refused():
    with pytest.raises(ConfigError, match=r"leave a class to the last client \(9 groups of 2 take all 15\), got True"):
        by_disjoint_classes(supply(1, 15, 3, 2), 10, None, seed=0, last_takes_rest=True)


@pytest.mark.parametrize("scheme", ["disjoint", "dirichlet", "dirichlet_in_domains"])
def test_classes_and_partitions_do_not_depend_on_the_order_of_hashes(scheme, tmp_path):
    """A folder of classes, opened and divided in two processes that hash strings differently."""
    for domain in ("photo", "sketch"):
        for name in ("zebra", "ant", "cat", "Bee", "dog"):
            folder = tmp_path / "set" / domain / name
            folder.mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (4, 4), (number, len(name), len(domain))).save(folder / f"{number}.png")
    code = (
        "from pathlib import Path; from fedprompt.config import DataConfig, PartitionConfig\n"
        "from fedprompt.data.partition.divide import make_manifest; from fedprompt.data.sources.open import open_source\n"
        f"data = DataConfig(source={str(tmp_path / 'set')!r}, test_fraction=0.5)\n"
        f"partition = PartitionConfig(scheme={scheme!r}, clients=2, shots=2, alpha=5.0, max_tries=1000)\n"
        f"source = open_source(data, Path({str(tmp_path / 'cache')!r}))\n"
        "print(source.class_names, make_manifest(source, data, partition, 0).to_json())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("('Bee', 'ant', 'cat', 'dog', 'zebra')")


def test_every_label_is_that_of_the_folder_its_image_came_from(tmp_path):
    shades = {"zebra": 10, "ant": 90, "cat": 170}
    for name, shade in shades.items():
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (4, 4), (shade, number, 0)).save(tmp_path / "set" / name / f"{number}.png")
    data = DataConfig(source=str(tmp_path / "set"))
    source = open_source(data, tmp_path / "cache")
    manifest = make_manifest(source, data, PartitionConfig(scheme="disjoint", clients=3), seed=0)
    for client in manifest.clients:
        held = {source.class_names[label] for label in source.labels[client.train]}
        assert held == {source.class_names[label] for label in source.labels[client.test]}
        for index in (*client.train, *client.test):
            shade = source.image(int(index)).getpixel((0, 0))[0]
            assert shades[source.class_names[source.labels[index]]] == shade


def test_shots_change_with_the_seed():
    images = supply(1, 4, 50, 3)
    first, second = (np.concatenate([train for train, _ in by_disjoint_classes(images, 2, 4, seed)]) for seed in (0, 1))
    assert set(first) != set(second)


def test_more_shots_than_images_names_the_class():
    with pytest.raises(
        DataError, match=r"partition\.shots must be at most the 3 training images of class 'class0', got 4"
    ):
        by_disjoint_classes(supply(1, 2, 3, 3), 2, 4, seed=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.data())
def test_label_subsets_are_circulant_and_each_class_is_even_among_its_holders(classes, clients, seed, data):
    subsets = data.draw(st.integers(1, classes))
    per_client = data.draw(st.integers(max(1, subsets - clients + 1), subsets))
    images = supply(2, classes, 30, 20)
    division = by_label_subsets(images, clients, subsets, per_client, seed)
    sizes = counts(division, images.labels, classes)
    alone = counts(by_label_subsets(images, subsets, subsets, 1, seed), images.labels, classes) > 0
    assert (alone.sum(axis=0) == 1).all()  # client k holds subset k, and subsets are disjoint
    assert alone.sum(axis=1).max() - alone.sum(axis=1).min() <= 1
    for client in range(clients):
        mine = alone[[(client + step) % subsets for step in range(per_client)]].any(axis=0)
        assert ((sizes[client] > 0) == mine).all()
    for column in sizes.T:
        assert np.ptp(column[column > 0]) <= 1
    assert_divides_exactly(division, images)


def test_two_label_subsets_give_every_second_client_the_same_half_of_the_classes():
    images = supply(3, 5, 20, 10)
    held = counts(by_label_subsets(images, 4, 2, 1, seed=0), images.labels, 5) > 0
    assert held.sum(axis=1).tolist() == [3, 2, 3, 2]
    assert (held[0] == held[2]).all()
    assert (held[0] != held[1]).all()


def test_label_subsets_with_all_subsets_at_every_client_are_even_in_every_class():
    images = supply(1, 4, 20, 10)
    assert (counts(by_label_subsets(images, 5, 2, 2, seed=0), images.labels, 4) == 4).all()


def test_label_subsets_change_with_the_seed():
    images = supply(1, 10, 4, 2)
    held = [counts(by_label_subsets(images, 2, 2, 1, seed), images.labels, 10) > 0 for seed in (0, 1)]
    assert (held[0] != held[1]).any()


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(1, 15), st.integers(0, 3))
def test_iid_sizes_differ_by_at_most_one(shape, clients, seed):
    images = supply(*shape)
    division = evenly(images, clients, seed)
    sizes = [len(train) for train, _ in division]
    assert max(sizes) - min(sizes) <= 1
    assert_divides_exactly(division, images)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda values: sum(values) > 0.01))
def test_apportion_sums_up_and_stays_within_one_of_every_share(count, weights):
    share = np.array(weights) / sum(weights)
    result = apportion(count, share, np.zeros(len(share)), np.arange(len(share)))
    assert result.sum() == count
    assert abs(result - count * share).max() < 1
    assert not result[share == 0].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_train_and_test_of_a_client_have_the_same_class_shares(scheme):
    source = TinySource()
    partition = PartitionConfig(scheme=scheme, clients=4, alpha=1.0)
    manifest = make_manifest(source, DataConfig(source="tiny"), partition, seed=0)
    for client in manifest.clients:
        train = np.bincount(source.labels[client.train], minlength=5)
        test = np.bincount(source.labels[client.test], minlength=5)
        assert abs(test - train / 2).max() <= 1.5  # there are half as many test images; the rest is rounding
        assert not test[train == 0].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_seeds_give_equal_manifests_and_other_seeds_others(scheme):
    source, data = TinySource(), DataConfig(source="tiny")
    partition = PartitionConfig(scheme=scheme, clients=5 if scheme in ("disjoint", "classes") else 8)
    first, again, other = (make_manifest(source, data, partition, seed) for seed in (0, 0, 1))
    assert first.to_json() == again.to_json()
    assert [client.checksum for client in first.clients] != [client.checksum for client in other.clients]


def test_a_partition_does_not_touch_the_global_random_state():
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    make_manifest(TinySource(), DataConfig(source="tiny"), PartitionConfig(scheme="dirichlet"), seed=0)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_partition_seed_wins_over_the_seed_of_the_experiment():
    source, data = TinySource(), DataConfig(source="tiny")
    fixed = PartitionConfig(scheme="iid", seed=7)
    assert make_manifest(source, data, fixed, 0).checksum == make_manifest(source, data, fixed, 1).checksum


def test_manifests_pass_their_own_check_for_every_scheme():
    source = TinySource()
    for scheme in SCHEMES:
        make_manifest(source, DataConfig(source="tiny"), PartitionConfig(scheme=scheme, clients=4), seed=0).check(
            source
        )


def test_one_client_gets_everything():
    source = TinySource()
    manifest = make_manifest(source, DataConfig(source="tiny"), PartitionConfig(scheme="iid", clients=1), seed=0)
    assert (len(manifest.clients[0].train), len(manifest.clients[0].test)) == (240, 120)


def test_per_cell_cut_keeps_the_lowest_ranks():
    source = TinySource()
    data = DataConfig(source="tiny", train_per_cell=3, test_per_cell=2)
    manifest = make_manifest(source, data, PartitionConfig(scheme="iid", clients=2), seed=0)
    train = np.concatenate([client.train for client in manifest.clients])
    test = np.concatenate([client.test for client in manifest.clients])
    assert (len(train), len(test)) == (4 * 5 * 3, 4 * 5 * 2)
    assert (source.ranks[train].max(), source.ranks[test].max()) == (2, 1)


def test_per_cell_cut_without_ranks_follows_the_split_seed_only():
    source, partition = TinySource(), PartitionConfig(scheme="iid", clients=1)
    source.ranks = None
    kept = {}
    for split_seed in (0, 1):
        data = DataConfig(source="tiny", train_per_cell=3, split_seed=split_seed)
        first, second = (make_manifest(source, data, partition, seed).clients[0].train for seed in (0, 1))
        assert first.tolist() == second.tolist()
        kept[split_seed] = first.tolist()
    assert kept[0] != kept[1]


def test_a_source_without_split_is_split_inside_every_cell():
    source = TinySource()
    source.splits = None
    data = DataConfig(source="tiny", test_fraction=0.25)
    manifest = make_manifest(source, data, PartitionConfig(scheme="iid", clients=1), seed=0)
    cells = source.domains * 5 + source.labels
    assert np.bincount(cells[manifest.clients[0].test]).tolist() == [4] * 20  # round(0.25 * 18)
    assert np.bincount(cells[manifest.clients[0].train]).tolist() == [14] * 20


def test_validation_images_are_left_out():
    source = TinySource()
    source.splits = np.where(source.ranks >= 10, "val", source.splits)
    manifest = make_manifest(source, DataConfig(source="tiny"), PartitionConfig(scheme="iid", clients=1), seed=0)
    assert len(manifest.clients[0].train) == 4 * 5 * 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"domains_per_client": 5}, "partition.domains_per_client must be at most the 4 domains of the data, got 5"),
        (
            {"scheme": "classes", "classes_per_client": 6},
            "partition.classes_per_client must be at most the 5 classes of the data, got 6",
        ),
        (
            {"scheme": "classes", "clients": 2, "classes_per_client": 2},
            "so that 2 clients can hold all 5 classes, got 2",
        ),
        ({"scheme": "disjoint", "clients": 6}, "partition.clients must be at most the 5 classes of the data, got 6"),
        (
            {"scheme": "label_subsets", "subsets": 6},
            "partition.subsets must be at most the 5 classes of the data, got 6",
        ),
        (
            {"scheme": "label_subsets", "subsets_per_client": 3},
            "partition.subsets_per_client must be at most partition.subsets 2, got 3",
        ),
        (
            {"scheme": "label_subsets", "subsets": 5, "subsets_per_client": 2, "clients": 3},
            "partition.clients must be at least 4, so that each of the 5 label subsets has a holder, got 3",
        ),
        ({"clients": 241}, "partition.clients must be at most the 240 training images, got 241"),
        ({"scheme": "manifest"}, "partition.manifest must name a JSON file for scheme 'manifest', got None"),
    ],
)
def test_settings_the_data_cannot_meet_name_field_rule_and_value(settings, message):
    with pytest.raises(ConfigError) as caught:
        make_manifest(TinySource(), DataConfig(source="tiny"), PartitionConfig(**settings), seed=0)
    assert message in str(caught.value)


def test_a_client_below_the_minimum_is_named():
    partition = PartitionConfig(scheme="iid", clients=6, min_test=30)
    with pytest.raises(
        DataError, match=r"partition\.min_test must be met by every client \(30 test images\), got '20 at client_0'"
    ):
        make_manifest(TinySource(), DataConfig(source="tiny"), partition, seed=0)


def test_a_client_without_test_images_is_an_error():
    partition = PartitionConfig(scheme="iid", clients=200)
    with pytest.raises(DataError, match=r"partition\.min_test must be met by every client .* got '0 at client_"):
        make_manifest(TinySource(), DataConfig(source="tiny"), partition, seed=0)


def test_a_class_without_training_images_is_named():
    source = TinySource()
    source.splits = np.where(source.labels == 3, "test", source.splits)
    with pytest.raises(DataError, match="have training images of every class, got \"none of 'cross' in 'tiny'\""):
        make_manifest(source, DataConfig(source="tiny"), PartitionConfig(), seed=0)


def test_a_source_without_test_images_is_an_error():
    source = TinySource()
    source.splits = np.full(len(source), "train")
    with pytest.raises(DataError, match=r"data\.source must have test images"):
        make_manifest(source, DataConfig(source="tiny"), PartitionConfig(), seed=0)


def test_the_manifest_says_which_settings_made_it():
    data = DataConfig(source="tiny", train_per_cell=6)
    manifest = make_manifest(TinySource(), data, PartitionConfig(scheme="dirichlet", alpha=2.0), seed=4)
    scheme = json.loads(manifest.to_json())["scheme"]
    assert (scheme["scheme"], scheme["alpha"], scheme["seed"], scheme["data"]["train_per_cell"]) == (
        "dirichlet",
        2.0,
        4,
        6,
    )
