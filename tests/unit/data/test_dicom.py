"""DICOM: files that pydicom ships, files made here, and hostile ones. Identifiers leave no header."""

from __future__ import annotations

import gc
import io
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image, ImageFile
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    JPEG2000,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
)

from fedprompt.config import DataConfig
from fedprompt.data.sources.base import decode
from fedprompt.data.sources.dicom import patient_of, shown
from fedprompt.data.sources.open import open_source
from fedprompt.errors import ConfigError, DataError

pytestmark = pytest.mark.unit

SECRET = "Mustermann^Erika"
PIXELS = np.array([[0, 100], [200, 400]], np.uint16)
Make = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """A file of four grey pixels; keyword arguments set or, with None, remove what the header says."""

    def make(name: str = "one.dcm", pixels: np.ndarray = PIXELS, **changes: Any) -> Path:
        header = Dataset()
        header.PatientName, header.PatientID = SECRET, SECRET
        header.Rows, header.Columns = pixels.shape[:2]
        header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
        header.BitsAllocated = header.BitsStored = 8 * pixels.itemsize
        header.HighBit, header.PixelRepresentation = header.BitsStored - 1, 0
        header.PixelData = pixels.tobytes()
        header.SOPClassUID, header.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
        header.file_meta = FileMetaDataset()
        header.file_meta.TransferSyntaxUID = changes.pop("syntax", ExplicitVRLittleEndian)
        for key, value in changes.items():
            if value is None:
                delattr(header, key)
            else:
                setattr(header, key, value)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        header.save_as(path, enforce_file_format=True)
        return path

    return make


def grey(path: Path) -> np.ndarray:
    picture = decode(path, path.name)
    assert picture.mode == "RGB"
    return np.asarray(picture)[..., 0]


def test_without_a_window_the_own_range_is_black_to_white(made: Make) -> None:
    assert grey(made()).tolist() == [[0, 64], [128, 255]]
    assert grey(made(pixels=np.full((2, 2), 7, np.uint16))).tolist() == [[0, 0], [0, 0]]


def test_a_window_is_that_of_the_standard(made: Make) -> None:
    window = {"WindowCenter": 150.5, "WindowWidth": 101}  # 100 is black, 200 is white
    assert grey(made(**window)).tolist() == [[0, 0], [255, 255]]
    assert grey(made(WindowCenter=[200.5, 1], WindowWidth=[401, 1])).tolist() == [[0, 64], [128, 255]]
    exact = grey(made(WindowCenter=200, WindowWidth=400, VOILUTFunction="LINEAR_EXACT"))
    assert exact.tolist() == [[0, 64], [128, 255]]
    sigmoid = grey(made(WindowCenter=200, WindowWidth=400, VOILUTFunction="SIGMOID"))
    assert sigmoid.tolist() == np.rint(255 / (1 + np.exp(-4 * (PIXELS - 200.0) / 400))).tolist()


def test_the_linear_window_is_pydicoms(made: Make) -> None:
    header = pydicom.dcmread(made(WindowCenter=170.25, WindowWidth=222))
    wanted = pydicom.pixels.apply_windowing(PIXELS, header) / (2**16 - 1)
    assert np.allclose(shown(PIXELS.astype(float), (170.25, 222)), wanted)


def test_slope_and_intercept_come_before_the_window(made: Make) -> None:
    scaled = made(RescaleSlope=2, RescaleIntercept=-100, WindowCenter=300.5, WindowWidth=801)  # -100 .. 700
    assert grey(scaled).tolist() == [[0, 64], [128, 255]]


def test_monochrome1_is_turned_around(made: Make) -> None:
    assert grey(made(PhotometricInterpretation="MONOCHROME1")).tolist() == [[255, 191], [128, 0]]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("CT_small.dcm", (128, 128)),
        ("MR_small.dcm", (64, 64)),
        ("MR_small_bigendian.dcm", (64, 64)),
        ("MR_small_RLE.dcm", (64, 64)),
        ("MR_small_implicit.dcm", (64, 64)),
        ("SC_rgb_small_odd_jpeg.dcm", (3, 3)),
        ("MR_small_jp2klossless.dcm", (64, 64)),
        ("SC_rgb_small_odd.dcm", (3, 3)),
        ("examples_ybr_color.dcm", None),
    ],
)
def test_files_that_pydicom_ships(name: str, size: tuple[int, int] | None) -> None:
    path = Path(str(get_testdata_file(name, download=False)))
    if size is None:
        with pytest.raises(DataError, match="must be one picture, got 30 frames"):
            decode(path, name)
        return
    picture = decode(path, name)
    assert (picture.mode, picture.size) == ("RGB", size)
    assert len(np.unique(np.asarray(picture))) > 2


def test_all_ways_to_store_a_picture_give_the_same() -> None:
    names = ("MR_small.dcm", "MR_small_bigendian.dcm", "MR_small_RLE.dcm", "MR_small_implicit.dcm")
    pictures = [np.asarray(decode(Path(str(get_testdata_file(name, download=False))), name)) for name in names]
    assert all((each == pictures[0]).all() for each in pictures)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"NumberOfFrames": 2}, "must be one picture, got 2 frames"),
        ({"Rows": 65535, "Columns": 65535}, r"size must have sides of 1 to 65535 and at most \d+ pixels"),
        ({"Rows": 0}, "size must have sides of 1"),
        ({"Rows": 2000, "Columns": 2000}, r"its pixels cannot be read \(ValueError\)"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "must be grey"),
        ({"SamplesPerPixel": 3}, "must be grey"),
        ({"BitsAllocated": 64}, "bits of a sample must be 8, 16 or 32, got 64"),
        ({"Rows": None}, "it has no picture"),
        ({"PixelData": None}, "its pixels cannot be read"),
    ],
)
def test_what_is_no_single_picture_is_refused(made: Make, changes: dict[str, Any], complaint: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = made(**changes)
    with pytest.raises(DataError, match=f"image must be readable: one.dcm: .*{complaint}"):
        decode(path, "one.dcm")


@pytest.mark.parametrize("name", ["MR_small_jpeg_ls_lossless.dcm", "no_meta.dcm", "JPGExtended.dcm", "rtplan.dcm"])
def test_what_pydicom_ships_and_is_not_read_here_is_refused(name: str) -> None:
    with pytest.raises(
        DataError, match=r"its transfer syntax must be one of: implicit|no DICOM file|it has no picture"
    ):
        decode(Path(str(get_testdata_file(name, download=False))), name)


def test_a_deflated_file_is_refused_before_it_is_unpacked(made: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="transfer syntax"):
        decode(Path(str(get_testdata_file("image_dfl.dcm", download=False))), "image_dfl.dcm")
    begun = made().read_bytes()
    head = begun[: begun.index(b"1.2.840.10008.1.2.1\0")]
    bomb = tmp_path / "bomb.dcm"
    squeezed = zlib.compressobj(9, wbits=-15)
    zeros = squeezed.compress(bytes(2**28)) + squeezed.flush()
    syntax = str(DeflatedExplicitVRLittleEndian).encode()
    bomb.write_bytes(head[:-2] + len(syntax).to_bytes(2, "little") + syntax + zeros)
    with pytest.raises(DataError):
        decode(bomb, "bomb.dcm")


def element(number: int, kind: bytes, value: bytes, length: int | None = None) -> bytes:
    """An element of group 2."""
    wide = kind in (b"OB", b"UC")
    size = (len(value) if length is None else length).to_bytes(4 if wide else 2, "little")
    return struct.pack("<HH", 2, number) + kind + (b"\0\0" if wide else b"") + size + value


@pytest.mark.parametrize(
    "between",
    [
        element(0x11, b"UC", bytes(20)),  # a kind whose length has four bytes
        element(0x11, b"OB", b"\xfe\xff\xdd\xe0" + bytes(4), length=2**32 - 1),  # up to a mark
        element(0x11, b"??", bytes(20)),
        element(0x11, b"OB", bytes(70_000)),  # longer than what is read to find the patient
        b"",
    ],
    ids=["long", "endless", "unknown", "far", "twice"],
)
def test_a_second_transfer_syntax_unpacks_nothing(
    tmp_path: Path, between: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydicom read on where our look at the beginning had ended: 600 kB became 600 MB, without a limit."""
    squeezed = zlib.compressobj(9, wbits=-15)
    bomb, unpacked = squeezed.compress(bytes(2**20)) + squeezed.flush(), list[int]()
    monkeypatch.setattr(zlib, "decompress", lambda *_: unpacked.append(1) or b"")
    plain, deflated = (str(each).encode() for each in (ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian))
    head = element(0x10, b"UI", plain + b"\0") + between + element(0x10, b"UI", deflated)
    path = tmp_path / "bomb.dcm"
    path.write_bytes(bytes(128) + b"DICM" + head + bomb)
    assert patient_of(path) is None
    with pytest.raises(DataError, match=r"its group 2 must|its transfer syntax must"):
        decode(path, "bomb.dcm")
    assert unpacked == []


@pytest.mark.parametrize(
    ("syntax", "kind"), [(JPEGBaseline8Bit, "JPEG"), (JPEG2000Lossless, "JPEG2000"), (JPEG2000, "JPEG2000")]
)
def test_a_compressed_picture_has_the_size_that_the_header_says(
    made: Make, syntax: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1300 bytes of a picture of 8 by 8 pixels became a gigabyte."""
    inside = io.BytesIO()
    Image.new("L", (2000, 1500)).save(inside, kind)
    path = made(pixels=np.zeros((8, 8), np.uint8))
    header = pydicom.dcmread(path)
    header.PixelData, header.file_meta.TransferSyntaxUID = encapsulate([inside.getvalue()]), syntax
    header["PixelData"].is_undefined_length = True
    header.save_as(path)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(DataError, match=r"its picture must be of the size in its header"):
        decode(path, "one.dcm")


def test_a_run_length_is_no_bomb(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes stand for 128: a file of the largest size would become 32 gigabytes."""
    packed = struct.pack("<16L", 1, 64, *[0] * 14) + b"\x81\0" * 2**14
    path = made(pixels=np.zeros((8, 8), np.uint8))
    header = pydicom.dcmread(path)
    header.PixelData, header.file_meta.TransferSyntaxUID = encapsulate([packed]), RLELossless
    header["PixelData"].is_undefined_length = True
    header.save_as(path)
    monkeypatch.setattr(pydicom.pixels, "pixel_array", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(DataError, match=r"its picture must be of the size in its header"):
        decode(path, "one.dcm")


def test_cut_and_changed_files_are_refused_or_read(made: Make, tmp_path: Path) -> None:
    whole, broken = made().read_bytes(), tmp_path / "broken.dcm"
    for length in range(0, len(whole), 7):
        broken.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"image must be readable: broken\.dcm"):
            decode(broken, "broken.dcm")
    for place in range(132, len(whole), 3):
        broken.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        said = ""
        try:
            decode(broken, "broken.dcm")
        except DataError as error:
            said = str(error)
        assert "Mustermann" not in said
        assert "Erika" not in said


def test_no_identifier_is_in_an_error_a_warning_or_the_memory_of_a_source(
    made: Make, tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    for number, split in enumerate(["train", "train", "test"]):
        made(f"set/{split}/{'ab'[number % 2]}/{number}.dcm", PatientID=f"{SECRET}{number}")
    made("set/test/b/3.dcm", PatientID="another")
    source = open_source(DataConfig(source=str(tmp_path / "set")), tmp_path / "cache")
    assert [source.image(index).size for index in range(4)] == [(2, 2)] * 4
    path = made("bad.dcm", NumberOfFrames=3, WindowCenter=1, WindowWidth=1)
    with pytest.raises(DataError) as raised:
        decode(path, "bad.dcm")
    chain = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert "Mustermann" not in " ".join(map(str, chain))
    assert "Mustermann" not in caplog.text + " ".join(str(each.message) for each in recwarn.list)
    gc.collect()
    for file in (tmp_path / "cache").rglob("*"):
        assert not file.is_file() or b"Mustermann" not in file.read_bytes()
    assert "Mustermann" not in repr(vars(source))


def test_no_warning_of_pydicom_quotes_a_header(
    made: Make, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    path = made(SpecificCharacterSet="ISO_IR 6")
    content = path.read_bytes().replace(b"\x08\x00ISO_IR 6", b"\x10\x00" + SECRET.encode())
    path.write_bytes(content)
    recwarn.clear()
    assert patient_of(path) is not None
    assert grey(path).shape == (2, 2)
    said = capfd.readouterr()
    assert "Mustermann" not in said.out + said.err + " ".join(str(each.message) for each in recwarn.list)


def test_files_of_one_patient_are_a_group(made: Make, tmp_path: Path) -> None:
    for number, patient in enumerate(["x", "y", "x", "", "z", ""]):
        made(f"set/{'ab'[number % 2]}/{number}.dcm", PatientID=patient)
    Image.new("RGB", (2, 2)).save(tmp_path / "set/a/9.png")
    source = open_source(DataConfig(source=str(tmp_path / "set")), tmp_path / "cache")
    assert source.groups is not None
    by_file = dict(zip(["0", "2", "4", "9", "1", "3", "5"], source.groups.tolist(), strict=True))
    assert by_file["0"] == by_file["2"]
    assert len(set(by_file.values())) == 6
    assert patient_of(tmp_path / "set/a/9.png") is None


def test_a_patient_in_training_and_test_images_is_refused_without_a_name(made: Make, tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in "ab":
            made(f"set/{split}/{label}/{split}{label}.dcm", PatientID=SECRET)
    from fedprompt.data.partition.split import train_and_test

    config = DataConfig(source=str(tmp_path / "set"))
    with pytest.raises(DataError, match=r'have all images of a group .* got "1 groups in several parts') as raised:
        train_and_test(open_source(config, tmp_path / "cache"), config)
    assert "Mustermann" not in str(raised.value)


def test_without_pydicom_the_extra_is_named(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made()
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ConfigError, match=r"DICOM files need the package pydicom: pip install 'fedprompt\[medical\]'"):
        decode(path, "one.dcm")
