"""Manifests: saved, inspected, edited, given back, and refused when they would spoil a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.manifest import Manifest
from fedprompt.data.partition import make_manifest
from fedprompt.data.pictures import draw_matrix
from fedprompt.data.tiny import TinySource
from fedprompt.errors import DataError

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
