"""Slices of NIfTI: files that nibabel ships, files made here, hostile ones; and pictures of sixteen bits."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from fedprompt.config import DataConfig
from fedprompt.data.sources import nifti
from fedprompt.data.sources.base import decode
from fedprompt.data.sources.open import open_source
from fedprompt.errors import ConfigError, DataError

pytestmark = pytest.mark.unit

SHIPPED = Path(nibabel.__file__).parent / "tests/data"
VOLUME = np.arange(24, dtype=np.int16).reshape(2, 3, 4)


def volume(path: Path, values: np.ndarray = VOLUME, kind: Any = nibabel.Nifti1Image, **header: Any) -> Path:
    image = kind(values, np.eye(4))
    for name, value in header.items():
        image.header[name] = value
    nibabel.save(image, path)
    return path


def grey(path: Path, number: int | None) -> np.ndarray:
    return np.asarray(decode(path, path.name, number))[..., 0]


def scaled(values: np.ndarray) -> list[list[int]]:
    low, high = values.min(), values.max()
    found: list[list[int]] = np.rint(255 * (values - low) / (high - low)).astype(int).tolist()
    return found


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_a_slice_is_that_of_nibabel(tmp_path: Path, name: str, kind: Any) -> None:
    path = volume(tmp_path / name, kind=kind)
    for number in range(4):
        assert grey(path, number).tolist() == scaled(VOLUME[:, :, number].T[::-1].astype(float))


def test_slope_and_range_of_the_header_count(tmp_path: Path) -> None:
    path = tmp_path / "v.nii"
    image = nibabel.Nifti1Image(np.array([[0.0, 10.0], [20.0, 30.0]]), np.eye(4))
    image.header.set_data_dtype(np.int16)
    image.header.set_slope_inter(0.5, 1)
    nibabel.save(image, path)
    assert grey(path, None).tolist() == [[85, 255], [0, 170]]
    assert grey(volume(tmp_path / "w.nii", np.float32([[0, 10], [20, 30]]), cal_min=10, cal_max=20), 0).tolist() == [
        [0, 255],
        [0, 255],
    ]


@pytest.mark.parametrize("name", ["anatomical.nii", "standard.nii.gz"])
def test_files_that_nibabel_ships(name: str) -> None:
    found = np.asanyarray(nibabel.load(SHIPPED / name).dataobj)
    number = found.shape[2] // 2
    wanted = found[:, :, number].T[::-1].astype(float)
    assert grey(SHIPPED / name, number).tolist() == scaled(wanted)
    with pytest.raises(DataError, match=f"must be one picture, got {found.shape[2]} slices: list them in a CSV file"):
        decode(SHIPPED / name, name)


@pytest.mark.parametrize("name", ["example4d.nii.gz", "functional.nii", "example_nifti2.nii.gz"])
def test_series_of_volumes_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"image must be readable: {name}: shape must have at most three axes"):
        decode(SHIPPED / name, name, 0)


def changed(path: Path, **header: Any) -> Path:
    """A file with other words in its header, in front of the values as they are."""
    content = path.read_bytes()
    words = nibabel.Nifti1Header(content[:348], check=False)
    for name, value in header.items():
        words[name] = value
    path.write_bytes(words.binaryblock + content[348:])
    return path


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"dim": [3, 32767, 32767, 4, 1, 1, 1, 1]}, "size must have sides of 1 to"),
        ({"dim": [3, 30000, 2000, 32767, 1, 1, 1, 1]}, "it is cut short"),
        ({"dim": [3, 300, 200, 4, 1, 1, 1, 1]}, "it is cut short"),
        ({"dim": [3, 0, 3, 4, 1, 1, 1, 1]}, "size must have sides of 1"),
        ({"vox_offset": 2e9}, "must have its values within the first"),
        ({"vox_offset": -4}, "must have its values within the first"),
        ({"vox_offset": float("nan")}, "its header cannot be read"),
        ({"datatype": 128}, "its values must be whole or real numbers"),
        ({"datatype": 32}, "its values must be whole or real numbers"),
        ({"datatype": 999}, "its header cannot be read"),
        ({"magic": b"ni1"}, "it is no NIfTI file in one piece"),
        ({"sizeof_hdr": 7}, "it is no NIfTI file in one piece"),
    ],
)
def test_a_header_that_means_harm_is_refused(tmp_path: Path, header: dict[str, Any], complaint: str) -> None:
    path = changed(volume(tmp_path / "v.nii"), **header)
    with pytest.raises(DataError, match=f"image must be readable: v.nii: .*({complaint})"):
        decode(path, "v.nii", 3)


def test_a_slice_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = volume(tmp_path / "v.nii")
    with pytest.raises(DataError, match=r"slice must be in 0\.\.3, got 4"):
        decode(path, "v.nii", 4)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nifti, "MOST_BYTES", 2**20)
    words = nibabel.Nifti1Header()
    words.set_data_shape((1000, 1000, 4))
    words["magic"], words["vox_offset"] = b"n+1", 352
    words.set_data_dtype(np.uint8)
    path = tmp_path / "bomb.nii.gz"
    path.write_bytes(gzip.compress(words.binaryblock + bytes(2**24)))
    with pytest.raises(DataError, match="must have its values within the first 1048576 bytes"):
        decode(path, path.name, 3)
    path.write_bytes(gzip.compress(volume(tmp_path / "v.nii").read_bytes())[:-40])
    with pytest.raises(DataError, match=r"it cannot be unpacked|cut short"):
        decode(path, path.name, 3)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(DataError, match="it cannot be unpacked"):
        decode(path, path.name, 3)


def test_cut_files_are_refused(tmp_path: Path) -> None:
    whole, broken = volume(tmp_path / "v.nii").read_bytes(), tmp_path / "broken.nii"
    for length in range(0, len(whole) - 1, 5):
        broken.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"image must be readable: broken\.nii"):
            decode(broken, "broken.nii", 3)


def test_a_table_names_slices_labels_and_patients(tmp_path: Path) -> None:
    volume(tmp_path / "v.nii")
    volume(tmp_path / "w.nii.gz", VOLUME[::-1].copy())
    rows = [f"{file},{number},{label},{patient}" for file, label, patient in
            (("v.nii", "ill", "p7"), ("w.nii.gz", "well", "p9")) for number in range(4)]  # fmt: skip
    table = tmp_path / "set.csv"
    table.write_text("\n".join(["path,slice,label,patient", *rows]))
    source = open_source(DataConfig(source=str(table)), tmp_path / "cache")
    assert source.groups is not None
    assert (len(source), source.groups.tolist()) == (8, [0] * 4 + [1] * 4)
    assert np.asarray(source.image(2))[..., 0].tolist() == scaled(VOLUME[:, :, 2].T[::-1].astype(float))
    table.write_text("path,slice,label\nv.nii,1,a\nv.nii,1,b\n")
    with pytest.raises(DataError, match=r"row 1: path must be listed once \(row 0\)"):
        open_source(DataConfig(source=str(table)), tmp_path / "cache")
    table.write_text("path,slice,label\nv.nii,-1,a\n")
    with pytest.raises(DataError, match="row 0: slice must be a whole number of at least 0, got '-1'"):
        open_source(DataConfig(source=str(table)), tmp_path / "cache")


def test_without_nibabel_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = volume(tmp_path / "v.nii")
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ConfigError, match=r"NIfTI files need the package nibabel: pip install 'fedprompt\[medical\]'"):
        decode(path, "v.nii", 0)


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_grey_of_sixteen_bits_keeps_its_steps(tmp_path: Path, name: str) -> None:
    values = np.array([[0, 257 * 10], [257 * 200, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / name)
    assert Image.open(tmp_path / name).mode.startswith("I;16")
    assert np.asarray(decode(tmp_path / name, name))[..., 0].tolist() == [[0, 10], [200, 255]]


def test_a_damaged_stream_is_a_picture_that_cannot_be_read(tmp_path: Path) -> None:
    """One such file ended a prediction of many, with a traceback."""
    packed = zlib.compressobj(9, wbits=31)
    whole = volume(tmp_path / "v.nii").read_bytes()
    begun = packed.compress(whole[:352]) + packed.flush(zlib.Z_FULL_FLUSH)
    path = tmp_path / "v.nii.gz"
    path.write_bytes(begun + b"\xff" * 64)  # a block of a kind that does not exist
    with pytest.raises(DataError, match=r"v\.nii\.gz: it cannot be unpacked \(error\)"):
        decode(path, path.name, 0)
