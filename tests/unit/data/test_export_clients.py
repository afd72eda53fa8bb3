"""Clients written to files: a site that reads its file holds exactly what the client held."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.data.partition import export_clients as export
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.export_clients import export_clients
from fedprompt.data.partition.manifest import ClientData, Clients, Manifest
from fedprompt.data.site_data import Agreed, open_site, site_manifest
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import DataError, StorageError

pytestmark = pytest.mark.unit
DATA = DataConfig(source="tiny")
SCHEMES = [
    {"scheme": "domains", "clients": 4},
    {"scheme": "classes", "clients": 5, "classes_per_client": 2},
    {"scheme": "dirichlet", "clients": 3, "alpha": 0.3},
    {"scheme": "disjoint", "clients": 5, "shots": 7},
    {"scheme": "iid", "clients": 2},
]


def tiny_manifest(**partition: object) -> Manifest:
    return make_manifest(TinySource(), DATA, PartitionConfig(**{"clients": 4, **partition}), seed=0)


def pixels(source: Source, indices: np.ndarray, cache: Path) -> np.ndarray:
    return ImageStore(source, 24, "crop", cache).pixels(indices)


def images_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("partition", SCHEMES, ids=lambda partition: str(partition["scheme"]))
@pytest.mark.parametrize(
    "selection", [{}, {"train_per_cell": 5, "test_per_cell": 2}, {"per_domain": 40}], ids=["all", "cut", "few"]
)
def test_a_site_holds_what_its_client_held(partition, selection, tmp_path: Path, cache: Path):
    data = DataConfig(source="tiny", **selection)
    source = open_source(data, cache)
    manifest = make_manifest(source, data, PartitionConfig(**partition), seed=1)
    paths = export_clients(source, manifest, tmp_path / "sites")
    assert [path.stem for path in paths] == list(manifest.clients.names)
    for place, (path, client) in enumerate(zip(paths, manifest.clients, strict=True)):
        own = open_site(str(path), "auto", data, cache)
        assert (own.class_names, own.domain_names) == (source.class_names, source.domain_names)
        held = site_manifest(own, data, manifest.clients.names, place).clients[place]
        for before, after in ((client.train, held.train), (client.test, held.test)):
            assert own.labels[after].tolist() == source.labels[before].tolist()
            assert own.domains[after].tolist() == source.domains[before].tolist()
            assert np.array_equal(pixels(own, after, cache), pixels(source, before, cache))


def test_the_order_of_a_list_is_kept_even_when_it_is_not_sorted(tmp_path: Path, cache: Path):
    source, whole = TinySource(), tiny_manifest()
    mixed = np.random.default_rng(0).permutation(whole.clients[0].train)
    manifest = replace(whole, clients=Clients.of([ClientData("alone", mixed, whole.clients[0].test[::-1])]))
    (path,) = export_clients(source, manifest, tmp_path / "sites")
    own = open_site(str(path), "parquet", DATA, cache)
    held = site_manifest(own, DATA, ["alone"], 0).clients[0]
    assert np.array_equal(pixels(own, held.train, cache), pixels(source, mixed, cache))
    assert np.array_equal(pixels(own, held.test, cache), pixels(source, whole.clients[0].test[::-1], cache))


def test_names_of_classes_that_a_client_lacks_are_written_all_the_same(tmp_path: Path, cache: Path):
    paths = export_clients(TinySource(), tiny_manifest(scheme="disjoint", clients=5), tmp_path / "sites")
    own = open_site(str(paths[0]), "auto", DATA, cache)
    assert len(np.unique(own.labels)) == 1
    assert own.class_names == TinySource().class_names
    assert Agreed(own, sorted(own.class_names)).class_names == tuple(sorted(own.class_names))


def test_row_groups_are_closed_by_number_and_by_size(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    source, manifest = TinySource(), tiny_manifest()
    monkeypatch.setattr(export, "GROUP_ROWS", 40)
    few = export_clients(source, manifest, tmp_path / "few")[0]
    monkeypatch.setattr(export, "GROUP_BYTES", 1)
    single = export_clients(source, manifest, tmp_path / "single")[0]
    assert [pq.ParquetFile(path).metadata.num_row_groups for path in (few, single)] == [3, 90]
    everything = np.arange(90)
    images = [pixels(open_site(str(path), "auto", DATA, cache), everything, cache) for path in (few, single)]
    assert np.array_equal(*images)


def test_the_same_clients_give_the_same_bytes(tmp_path: Path):
    first, again = (export_clients(TinySource(), tiny_manifest(), tmp_path / name)[2] for name in ("one", "two"))
    assert first.read_bytes() == again.read_bytes()


class Annotated(TinySource):
    """Images that carry words beside their pixels."""

    def image(self, index: int) -> Image.Image:
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x013B] = "Doctor Who"
        super().image(index).save(buffer, "PNG", exif=exif, icc_profile=b"Doctor Who")
        return Image.open(buffer)


def test_nothing_but_pixels_is_taken_from_an_image(tmp_path: Path):
    assert "Doctor Who" in str(Annotated().image(0).info["icc_profile"])
    for path in export_clients(Annotated(), tiny_manifest(), tmp_path / "sites"):
        assert b"Doctor" not in path.read_bytes()


def test_a_directory_that_holds_anything_is_left_alone(tmp_path: Path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(DataError, match=r"^--output must be a new or an empty directory, got "):
        export_clients(TinySource(), tiny_manifest(), tmp_path)
    with pytest.raises(DataError, match=r"^--output must be a new or an empty directory, got "):
        export_clients(TinySource(), tiny_manifest(), tmp_path / "kept.txt")
    assert images_in(tmp_path) == ["kept.txt"]


def test_a_manifest_of_other_images_is_refused_before_anything_is_written(tmp_path: Path):
    manifest = replace(tiny_manifest(), source_fingerprint="0" * 64)
    with pytest.raises(DataError, match="it was made for other images"):
        export_clients(TinySource(), manifest, tmp_path / "sites")
    assert not (tmp_path / "sites").exists()


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", "-rf", "ward\n3", "Zürich", "a b"])
def test_a_client_whose_name_is_no_file_name_is_refused(name: str, tmp_path: Path):
    whole = tiny_manifest()
    manifest = replace(whole, clients=Clients.of([replace(whole.clients[0], name=name)]))
    with pytest.raises(DataError, match=r"manifest\.clients\.name must be letters, digits"):
        export_clients(TinySource(), manifest, tmp_path / "sites")
    assert not (tmp_path / "sites").exists()


def test_names_that_some_file_systems_take_for_one_are_refused(tmp_path: Path):
    first, second = tiny_manifest().clients[:2]
    clients = Clients.of([replace(first, name="North"), replace(second, name="north")])
    with pytest.raises(DataError, match="differ in more than case to be the name of a file, got 'north'"):
        export_clients(TinySource(), replace(tiny_manifest(), clients=clients), tmp_path / "sites")


class Damaged(TinySource):
    """One image of the third client cannot be read."""

    def image(self, index: int) -> Image.Image:
        if index == 200:
            raise DataError("image must be readable: tiny row 200")
        return super().image(index)


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path: Path):
    with pytest.raises(DataError, match="row 200"):
        export_clients(Damaged(), tiny_manifest(), tmp_path / "sites")
    assert images_in(tmp_path / "sites") == ["client_0.parquet", "client_1.parquet"]


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*client_0\.parquet': No space left on device"):
        export_clients(TinySource(), tiny_manifest(), tmp_path / "sites")
    assert images_in(tmp_path / "sites") == []
