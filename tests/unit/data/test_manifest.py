"""Manifests: saved, inspected, edited, given back, and refused when they would spoil a measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.partition.client_names import NumberedNames
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.manifest import ClientData, Clients, Manifest, stored_checksum
from fedprompt.data.partition.partition_plot import draw_matrix
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import DataError, RunError

pytestmark = pytest.mark.unit
DATA = DataConfig(source="tiny")


def tiny_manifest() -> Manifest:
    return make_manifest(TinySource(), DATA, PartitionConfig(scheme="domains", clients=4), seed=0)


def edited(change) -> Manifest:
    raw = json.loads(tiny_manifest().to_json())
    change(raw)
    return Manifest.from_json(json.dumps(raw))


def test_saving_and_loading_gives_the_same_manifest(tmp_path: Path):
    manifest = tiny_manifest()
    manifest.save(tmp_path / "parts" / "m.json")
    again = Manifest.load(tmp_path / "parts" / "m.json")
    assert again.to_json() == manifest.to_json()
    assert again.checksum == manifest.checksum
    assert again.clients[2].train.dtype == np.int64


def test_a_saved_manifest_takes_the_place_of_a_partition(tmp_path: Path):
    manifest = tiny_manifest()
    manifest.save(tmp_path / "m.json")
    given = PartitionConfig(scheme="manifest", manifest=str(tmp_path / "m.json"))
    assert make_manifest(TinySource(), DATA, given, seed=9).checksum == manifest.checksum


def test_an_edited_manifest_is_accepted_with_a_new_checksum():
    manifest = edited(lambda raw: raw["clients"][0]["train"].pop())
    manifest.check(TinySource())
    assert len(manifest.clients[0].train) == 59
    assert manifest.checksum != tiny_manifest().checksum
    changed = [
        old.name
        for old, new in zip(tiny_manifest().clients, manifest.clients, strict=True)
        if old.checksum != new.checksum
    ]
    assert changed == ["client_0"]


def test_class_matrix_counts_training_images():
    assert tiny_manifest().class_matrix(TinySource().labels).tolist() == [[12] * 5] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: raw["clients"][1]["train"].append(360),
            "manifest.clients.client_1.train must hold indices in 0..359, got 360",
        ),
        (
            lambda raw: raw["clients"][1]["train"].append(-1),
            "manifest.clients.client_1.train must hold indices in 0..359, got -1",
        ),
        (
            lambda raw: raw["clients"][1]["test"].append(raw["clients"][1]["test"][0]),
            "client_1.test must hold every image once, got 102",
        ),
        (
            lambda raw: raw["clients"][1]["test"].append(0),
            "client_1.test must hold no training image of any client ('client_0' trains",
        ),
        (
            lambda raw: raw["clients"][2]["train"].clear(),
            "manifest.clients.client_2.train must hold at least one image, got []",
        ),
        (lambda raw: raw["clients"].clear(), "manifest.clients must hold at least one client, got []"),
        (
            lambda raw: raw["clients"][2].update(name="client_0"),
            "manifest.clients must have different names, got 'client_0'",
        ),
        (
            lambda raw: raw["source"].update(fingerprint="0" * 64),
            "manifest.source.fingerprint must be that of data.source 'tiny'",
        ),
        (
            lambda raw: raw["classes"].reverse(),
            "manifest.classes must be ['disc', 'square', 'triangle', 'cross', 'bars'], got ['bars'",
        ),
    ],
)
def test_check_names_what_an_edit_broke(change, message):
    manifest = edited(change)
    with pytest.raises(DataError) as caught:
        manifest.check(TinySource())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(format="other"), "manifest.format must be 'fedprompt-manifest-1', got 'other'"),
        (lambda raw: raw.pop("classes"), "manifest.classes must be a list, got None"),
        (lambda raw: raw["clients"][0].pop("name"), "manifest.clients.0.name must be a str, got None"),
        (
            lambda raw: raw["clients"][0]["train"].append(1.5),
            "manifest.clients.client_0.train must hold integers, got 1.5",
        ),
        (lambda raw: raw["clients"][0]["train"].append(10**30), "manifest.clients.client_0.train must hold integers"),
    ],
)
def test_reading_names_what_is_not_a_manifest(change, message):
    with pytest.raises(DataError) as caught:
        edited(change)
    assert message in str(caught.value)


SOURCE = TinySource()
few_images = st.lists(st.integers(-1, 12).map(lambda index: 360 if index == 12 else index), max_size=4)


def naive_fault(clients: list[ClientData]) -> str | None:
    """What the rules say, client by client and image by image."""
    for client in clients:
        for part, held in (("train", client.train.tolist()), ("test", client.test.tolist())):
            where = f"manifest.clients.{client.name}.{part} must hold"
            outside = [index for index in held if not 0 <= index < 360]
            twice = sorted(index for index in set(held) if held.count(index) > 1)
            if not held:
                return f"{where} at least one image, got []"
            if outside:
                return f"{where} indices in 0..359, got {outside[0]}"
            if twice:
                return f"{where} every image once, got {twice[0]}"
    for client in clients:
        for index in client.test.tolist():
            holders = [other.name for other in clients if index in other.train]
            if holders:
                who = f"any client ({holders[0]!r} trains on it)"
                return f"manifest.clients.{client.name}.test must hold no training image of {who}, got {index}"
    return None


@given(st.lists(st.tuples(few_images, few_images), min_size=1, max_size=4))
def test_all_clients_at_once_are_checked_like_one_after_the_other(lists: list[tuple[list[int], list[int]]]):
    clients = [
        ClientData(f"client_{number}", np.array(train, dtype=np.int64), np.array(test, dtype=np.int64))
        for number, (train, test) in enumerate(lists)
    ]
    manifest, fault = replace(tiny_manifest(), clients=Clients.of(clients)), naive_fault(clients)
    if fault is None:
        manifest.check(SOURCE)
    else:
        with pytest.raises(DataError) as caught:
            manifest.check(SOURCE)
        assert str(caught.value) == fault


def renamed() -> Manifest:
    """The tiny manifest with names of another kind."""
    manifest = tiny_manifest()
    return replace(manifest, clients=Clients.of(replace(each, name=f"ward {each.name}") for each in manifest.clients))


@pytest.mark.parametrize("make", [tiny_manifest, renamed])
def test_a_run_file_gives_the_manifest_back(make):
    manifest = make()
    facts = json.loads(json.dumps(manifest.to_facts()))
    again = Manifest.from_facts(facts.get)
    again.check(SOURCE)
    assert again.to_json() == manifest.to_json()
    assert stored_checksum(facts.get) == again.checksum == manifest.checksum
    assert len(json.dumps(facts["manifest"])) < 1500


def test_a_manifest_that_a_run_file_holds_as_json_is_the_same_one():
    manifest = tiny_manifest()
    raw = {**json.loads(manifest.to_json()), "checksum": "of an earlier version"}
    facts = {"manifest": raw, "clients": [client.name for client in manifest.clients]}
    assert stored_checksum(facts.get) == manifest.checksum
    assert Manifest.from_facts(facts.get).to_json() == manifest.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": {"numbered": 5}}, r"index_lists\.train must hold 5 lists, got 4"),
        ({"clients": 4}, "must be a list of names"),
        ({"index_lists": {"train": "AAAA", "test": ""}}, "manifest: the clients of the run must be compressed text"),
        ({"index_lists": {"train": 3}}, r"index_lists\.train must be a str, got 3"),
        ({"manifest": {"format": "other"}}, r"manifest\.format must be"),
        ({"manifest": None}, r"manifest\.format must be"),
    ],
)
def test_facts_that_do_not_fit_together_are_an_error(change, message):
    facts = {**tiny_manifest().to_facts(), **change}
    with pytest.raises(DataError, match=message):
        Manifest.from_facts(facts.get)


def test_clients_of_another_manifest_in_a_run_file_are_told():
    manifest = tiny_manifest()
    swapped = {"index_lists": {"train": manifest.clients.test.packed(), "test": manifest.clients.train.packed()}}
    for change in (
        swapped,
        {"clients": list("abcd")},
        {"manifest": {**manifest.to_facts()["manifest"], "checksum": None}},
    ):
        with pytest.raises(RunError, match=r"manifest\.checksum must be that of the clients beside it"):
            Manifest.from_facts({**manifest.to_facts(), **change}.get)


def test_names_that_are_read_have_the_checksum_of_names_that_were_made():
    manifest = tiny_manifest()
    read = Manifest.from_json(manifest.to_json())
    assert isinstance(read.clients.names, NumberedNames)
    assert read.checksum == manifest.checksum != renamed().checksum


def test_every_part_of_a_manifest_is_in_its_checksum():
    manifest = tiny_manifest()
    first, second, *others = manifest.clients
    changed = [
        [replace(first, train=first.train[1:]), second],
        [replace(first, test=first.test[1:]), second],
        [replace(first, name="x"), second],
        [replace(first, train=first.train[:-1]), replace(second, train=np.append(first.train[-1], second.train))],
        [second],
    ]
    made = [replace(manifest, clients=Clients.of([*each, *others])) for each in changed]
    everything = [manifest, replace(manifest, scheme={}), *made]
    assert len({each.checksum for each in everything}) == len(everything)


def test_a_file_that_is_not_json_or_not_there_is_an_error(tmp_path: Path):
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(DataError, match="manifest: not JSON"):
        Manifest.load(tmp_path / "m.json")
    with pytest.raises(DataError, match=r"partition\.manifest: cannot read"):
        Manifest.load(tmp_path / "absent.json")


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (6, 7), (100, 200)])
def test_the_picture_fits_few_and_many(tmp_path: Path, clients: int, classes: int):
    matrix = np.random.default_rng(0).integers(0, 30, size=(clients, classes))
    names = [f"client_{index}" for index in range(clients)]
    draw_matrix(matrix, names, [f"some class {index}" for index in range(classes)], tmp_path / "m.png")
    with Image.open(tmp_path / "m.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert max(picture.size) < 3000


def test_the_picture_of_a_manifest_is_written(tmp_path: Path):
    tiny_manifest().picture(TinySource().labels, tmp_path / "new" / "m.png")
    assert (tmp_path / "new" / "m.png").stat().st_size > 5000
