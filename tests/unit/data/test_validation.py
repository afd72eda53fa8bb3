"""Validation images are a part of every client's training images."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedprompt.config import Config, parse
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.export_clients import export_clients
from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.partition.split import grouped
from fedprompt.data.partition.validation import with_validation
from fedprompt.data.sources.open import open_source
from fedprompt.errors import ConfigError, DataError

ONE_DOMAIN = np.zeros(1000, dtype=np.int64)


def lists(*parts: list[int]) -> IndexLists:
    return IndexLists.of([np.array(part) for part in parts])


def manifest_of(tmp_path: Path, scheme: str = "dirichlet", **data: Any) -> tuple[Any, Manifest]:
    config = parse({"data": {"source": "tiny", **data}, "partition": {"scheme": scheme, "clients": 4, "min_train": 6}})
    source = open_source(config.data, tmp_path)
    return source, make_manifest(source, config.data, config.partition, config.seed)


@pytest.mark.parametrize("size", [0.2, 0.5, 1, 3])
@pytest.mark.parametrize("scheme", ["domains", "dirichlet", "iid", "classes"])
def test_training_and_validation_images_are_the_training_images_without_a_split(
    tmp_path: Path, scheme: str, size: float
) -> None:
    _, whole = manifest_of(tmp_path, scheme)
    _, split = manifest_of(tmp_path, scheme, validation=size)
    for before, after in zip(whole.clients, split.clients, strict=True):
        assert sorted([*after.train, *after.validation]) == before.train.tolist()
        assert not set(after.train) & set(after.validation)
        assert not set(after.validation) & set(split.clients.test.values)
        assert after.test.tolist() == before.test.tolist()
        assert len(after.validation)


def test_a_share_is_met_in_every_client_and_within_one_image_in_every_class(tmp_path: Path) -> None:
    source, whole = manifest_of(tmp_path, validation=0)
    _, split = manifest_of(tmp_path, validation=0.25)
    for before, after in zip(whole.clients, split.clients, strict=True):
        assert abs(len(after.validation) - 0.25 * len(before.train)) <= 0.5
        for domain in range(len(source.domain_names)):
            for label in range(len(source.class_names)):

                def cell(images: np.ndarray, label: int = label, domain: int = domain) -> int:
                    return int(((source.labels[images] == label) & (source.domains[images] == domain)).sum())

                assert abs(cell(after.validation) - 0.25 * cell(before.train)) < 1
                assert cell(after.train) or not cell(before.train)


def test_a_whole_number_is_the_number_of_images_of_every_domain_and_class(tmp_path: Path) -> None:
    source, split = manifest_of(tmp_path, "domains", validation=2)
    for client in split.clients:
        cells = source.domains[client.validation] * 100 + source.labels[client.validation]
        assert set(np.unique(cells, return_counts=True)[1]) == {2}


def test_every_pair_keeps_a_training_image_also_where_more_are_asked_for_than_it_has() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2])
    left, validation = with_validation(lists([*range(6)]), labels, ONE_DOMAIN, 5, seed=0)
    assert sorted(labels[left[0]].tolist()) == [0, 1, 2]
    assert sorted(labels[validation[0]].tolist()) == [0, 0, 1]


def test_the_seed_of_the_split_chooses_and_that_of_the_experiment_does_not(tmp_path: Path) -> None:
    def chosen(seed: int, split_seed: int) -> list[int]:
        config = parse({"data": {"source": "tiny", "validation": 0.3, "split_seed": split_seed}, "seed": seed})
        partition = config.partition.model_copy(update={"seed": 0, "clients": 4})
        return make_manifest(
            open_source(config.data, tmp_path), config.data, partition, config.seed
        ).clients.validation.values.tolist()  # type: ignore[union-attr]

    assert chosen(0, 0) == chosen(1, 0) != chosen(0, 1)


@given(st.randoms(use_true_random=False))
def test_the_order_of_images_and_of_clients_does_not_matter(random: Any) -> None:
    labels = np.arange(60) % 3
    parts = [list(range(20)), list(range(20, 60))]
    _, expected = with_validation(lists(*parts), labels, ONE_DOMAIN, 0.3, seed=5)
    for part in parts:
        random.shuffle(part)
    _, found = with_validation(lists(*parts[::-1]), labels, ONE_DOMAIN, 0.3, seed=5)
    assert [part.tolist() for part in found[::-1]] == [part.tolist() for part in expected[:]]


def test_the_images_of_a_client_do_not_depend_on_the_other_clients() -> None:
    labels = np.arange(60) % 3
    _, alone = with_validation(lists(list(range(20))), labels, ONE_DOMAIN, 0.3, seed=5)
    _, among = with_validation(lists(list(range(20, 60)), list(range(20))), labels, ONE_DOMAIN, 0.3, seed=5)
    assert alone[0].tolist() == among[1].tolist()


def test_few_shots_give_the_share_of_the_client_and_not_one_image_of_every_class() -> None:
    labels = np.arange(20) % 10  # two images of each of ten classes
    left, validation = with_validation(lists(list(range(20))), labels, ONE_DOMAIN, 0.2, seed=0)
    assert len(validation[0]) == 4
    assert len(set(labels[validation[0]])) == 4
    assert set(labels[left[0]]) == set(range(10))


def test_a_client_with_one_image_of_every_class_still_gives_one() -> None:
    left, validation = with_validation(lists([0, 1, 2]), np.arange(3), ONE_DOMAIN, 0.2, seed=0)
    assert (len(left[0]), len(validation[0])) == (2, 1)


def test_a_client_with_one_image_is_refused() -> None:
    with pytest.raises(DataError, match="both training and validation images, got '1 training images of 1"):
        with_validation(lists([0, 1, 2], [3]), np.zeros(4, dtype=np.int64), ONE_DOMAIN, 0.2, seed=0)


@given(
    groups=st.lists(st.integers(0, 11), min_size=48, max_size=48),
    share=st.sampled_from([0.1, 0.25, 0.5, 2]),
    seed=st.integers(0, 3),
)
def test_images_of_one_group_are_never_on_both_sides(groups: list[int], share: float, seed: int) -> None:
    labels, of = np.arange(48) % 4, np.array(groups)
    try:
        left, validation = with_validation(
            lists(list(range(24)), list(range(24, 48))), labels, ONE_DOMAIN, share, seed, of
        )
    except DataError:
        return  # a client whose images are all of groups that cannot be given
    assert not set(of[left.values]) & set(of[validation.values])
    assert sorted([*left.values, *validation.values]) == list(range(48))


@pytest.mark.parametrize("names", [True, False])
def test_the_groups_of_a_parquet_file_are_kept_together(tmp_path: Path, names: bool) -> None:
    rows = 96
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    groups = [10**12 + row % 12 + (row >= 84) * 12 for row in range(rows)]  # of all four classes
    columns = {
        "image": [buffer.getvalue()] * rows,
        "label": [row // 12 % 4 for row in range(rows)],
        "split": ["train" if row < 84 else "test" for row in range(rows)],
        "group": [f"patient {group}" for group in groups] if names else groups,
    }
    pq.write_table(pa.table(columns), tmp_path / "set.parquet")
    config = parse(
        {
            "data": {"source": str(tmp_path / "set.parquet"), "validation": 0.25},
            "partition": {"scheme": "iid", "clients": 2},
        }
    )
    source = open_source(config.data, tmp_path)
    held = make_manifest(source, config.data, config.partition, 0).clients
    assert held.validation is not None
    sides = [{groups[image] for image in part.values.tolist()} for part in (held.train, held.validation)]
    assert not sides[0] & sides[1]
    assert sides[1]
    assert source.groups is not None
    assert len(set(source.groups.tolist())) == 24


def test_groups_of_two_kinds_or_without_a_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"", b""], "label": [0, 1], "group": ["a", None]}), tmp_path / "set.parquet")
    with pytest.raises(DataError, match="row 1: group must be all integers or all names, got None"):
        open_source(parse({"data": {"source": str(tmp_path / "set.parquet")}}).data, tmp_path)


def test_small_groups_meet_the_share() -> None:
    groups = np.arange(120) // 3  # forty groups of three images, of one class each
    labels = groups % 4
    left, validation = with_validation(lists(list(range(120))), labels, ONE_DOMAIN, 0.25, 0, groups)
    assert np.bincount(labels[validation[0]]).tolist() == [6, 6, 6, 6] or abs(len(validation[0]) - 30) <= 6
    assert set(labels[left[0]]) == set(range(4))


def test_groups_of_one_image_are_as_no_groups_at_all() -> None:
    labels, train = np.arange(40) % 4, lists(list(range(25)), list(range(25, 40)))
    _, plain = with_validation(train, labels, ONE_DOMAIN, 0.3, 1)
    _, grouped = with_validation(train, labels, ONE_DOMAIN, 0.3, 1, np.arange(40))
    assert plain.values.tolist() == grouped.values.tolist()


def test_a_manifest_carries_the_lists_and_reads_them_back(tmp_path: Path) -> None:
    source, split = manifest_of(tmp_path, validation=0.25)
    split.save(tmp_path / "m.json")
    again = Manifest.load(tmp_path / "m.json")
    again.check(source)
    assert again.checksum == split.checksum
    assert again.clients.validation is not None
    assert again.clients.validation.values.tolist() == split.clients.validation.values.tolist()  # type: ignore[union-attr]
    facts = json.loads(json.dumps(split.to_facts()))
    assert Manifest.from_facts(facts.get).checksum == split.checksum


def test_a_manifest_without_validation_images_is_written_as_it_always_was(tmp_path: Path) -> None:
    _, whole = manifest_of(tmp_path)
    assert "validation" not in whole.to_json()
    assert set(whole.to_facts()["index_lists"]) == {"train", "test"}


def test_a_manifest_from_a_file_decides_and_gets_a_split_if_it_has_none(tmp_path: Path) -> None:
    def read(**data: Any) -> Manifest:
        config = parse({"data": {"source": "tiny", **data}, "partition": {"scheme": "manifest", "manifest": path}})
        return make_manifest(open_source(config.data, tmp_path), config.data, config.partition, 0)

    path = str(tmp_path / "m.json")
    _, own = manifest_of(tmp_path, validation=0.25)
    own.save(path)
    assert read().checksum == read(validation=0.5).checksum == own.checksum
    _, whole = manifest_of(tmp_path)
    whole.save(path)
    assert read().checksum == whole.checksum
    given_one = read(validation=0.25)
    assert given_one.clients.validation.values.tolist() == own.clients.validation.values.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("train", r"validation must hold no training image of any client \(.* trains on it\)"),
        ("test", r"test must hold no validation image of any client \(.* validates on it\)"),
    ],
)
def test_an_edited_manifest_with_an_image_on_two_sides_is_refused(tmp_path: Path, part: str, message: str) -> None:
    source, split = manifest_of(tmp_path, validation=0.25)
    raw = json.loads(split.to_json())
    raw["clients"][0]["validation"].append(raw["clients"][1][part][0])
    with pytest.raises(DataError, match=message):
        Manifest.from_json(json.dumps(raw)).check(source)


def test_a_client_without_validation_images_beside_others_that_have_some_is_refused(tmp_path: Path) -> None:
    source, split = manifest_of(tmp_path, validation=0.25)
    raw = json.loads(split.to_json())
    raw["clients"][2]["validation"] = []
    with pytest.raises(DataError, match=r"validation must hold at least one image"):
        Manifest.from_json(json.dumps(raw)).check(source)


@pytest.mark.parametrize("value", [1.0, -0.1, -1, "a", True])
def test_anything_but_a_share_or_a_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"data.validation must be a share below 1, or a whole number"):
        parse({"data": {"validation": value}})


def test_settings_at_their_defaults_are_not_in_hashes_and_run_files() -> None:
    plain = parse({})
    for same in ({"data": {"validation": 0}}, {"federation": {"select": "last", "evaluate_on": "test"}}):
        assert parse(same).digest() == plain.digest()
    assert not {"evaluate_on", "select", "patience"} & set(plain.model_dump(mode="json")["federation"])
    assert parse({"data": {"validation": 0.2}}).digest() != plain.digest()


def test_sites_get_no_validation_images(tmp_path: Path) -> None:
    source, split = manifest_of(tmp_path, validation=0.25)
    with pytest.raises(DataError, match=r"data.validation must be absent: a site has no validation images"):
        export_clients(source, split, tmp_path / "sites")


def test_a_method_never_sees_a_validation_image_in_training(settings: Callable[..., dict[str, Any]]) -> None:
    from fedprompt.client.factory import ExperimentFactory

    for method in ("fedvpt", "head_tune"):
        factory = ExperimentFactory(settings(data={"validation": 0.5}, method={"name": method}))
        source, manifest, backbone, _ = factory.prepare()
        bank = factory.bank(source, manifest, backbone)
        trained = {int(i) for client in range(4) for i in bank.images(client, "train").indices}
        kept = {int(i) for client in range(4) for i in bank.images(client, "validation").indices}
        assert not trained & kept
        assert kept


def grouped_set(tmp_path: Path, groups: list[int], labels: list[int]) -> Config:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    table = {"image": [buffer.getvalue()] * len(labels), "label": labels, "group": groups}
    pq.write_table(pa.table(table), tmp_path / "set.parquet")
    return parse({"data": {"source": str(tmp_path / "set.parquet"), "validation": 0.25, "test_fraction": 0.3},
                  "partition": {"scheme": "iid", "clients": 2}})  # fmt: skip


@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 10**6))
def test_a_split_of_ours_tears_no_group(count: int, size: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    groups = np.repeat(np.arange(count), draws.integers(1, size + 1, count))
    labels, domains = draws.integers(0, 3, len(groups)), draws.integers(0, 2, len(groups))
    train, test = grouped(labels, domains, groups, 0.25, seed)
    assert sorted([*train, *test]) == list(range(len(groups)))
    assert not set(groups[train]) & set(groups[test])
    assert set(labels[train]) == set(labels), "every class keeps a training image"
    again = grouped(labels, domains, groups, 0.25, seed)
    assert all((a == b).all() for a, b in zip((train, test), again, strict=True))


def test_groups_of_one_image_are_split_as_images_are() -> None:
    labels = np.repeat(np.arange(4), 50)
    _, test = grouped(labels, np.zeros_like(labels), np.arange(200), 0.2, 0)
    assert np.bincount(labels[test]).tolist() == [10] * 4


def test_patients_are_in_one_part_and_stay_together_in_the_files_of_sites(tmp_path: Path) -> None:
    groups = [row // 6 for row in range(240)]
    config = grouped_set(tmp_path, groups, [row % 3 for row in range(240)])
    source = open_source(config.data, tmp_path)
    manifest = make_manifest(source, config.data, config.partition, 0)
    held = manifest.clients
    assert held.validation is not None
    sides = [{groups[image] for image in part.values.tolist()} for part in (held.train, held.validation, held.test)]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]
    assert 0.25 <= len(held.test.values) / 240 <= 0.35
    plain = config.data.model_copy(update={"validation": None})
    files = export_clients(source, make_manifest(source, plain, config.partition, 0), tmp_path / "sites")
    stored = [pq.read_table(file).to_pydict() for file in files]
    assert all(set(each["group"]) <= set(groups) for each in stored)
    for each in stored:
        parts = {
            part: {g for g, s in zip(each["group"], each["split"], strict=True) if s == part}
            for part in ("train", "test")
        }
        assert not parts["train"] & parts["test"]


def test_a_manifest_that_tears_a_group_is_refused(tmp_path: Path) -> None:
    config = grouped_set(tmp_path, [row // 6 for row in range(60)], [row % 3 for row in range(60)])
    source = open_source(config.data, tmp_path)
    manifest = make_manifest(source, config.data, config.partition, 0)
    manifest.save(tmp_path / "whole.json")
    manifest.clients.train.values[0], manifest.clients.test.values[0] = (
        manifest.clients.test.values[0], manifest.clients.train.values[0])  # fmt: skip
    manifest.save(tmp_path / "torn.json")

    def by_hand(path: Path) -> None:
        partition = config.partition.model_copy(update={"scheme": "manifest", "manifest": str(path)})
        make_manifest(source, config.data, partition, 0)

    by_hand(tmp_path / "whole.json")
    with pytest.raises(DataError, match=r"partition\.manifest must have all images of a group .* in one part"):
        by_hand(tmp_path / "torn.json")
