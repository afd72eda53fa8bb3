"""Images, parquet files and folders that mean harm: the size an image claims is checked before memory is asked for."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedprompt.data.sources import parquet
from fedprompt.data.sources.base import decode
from fedprompt.data.sources.cifar import CifarSource
from fedprompt.data.sources.image_folder import FolderSource
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.errors import DataError

pytestmark = pytest.mark.unit

PICTURE = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def patched(content: bytes, place: int, new: bytes) -> bytes:
    return content[:place] + new + content[place + len(new) :]


def webp(width: int, height: int) -> bytes:
    frame = saved(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[12:]
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    moving = bytes(16) + frame
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + sides + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    body += b"ANMF" + struct.pack("<I", len(moving)) + moving
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def tiled_tiff() -> bytes:
    """Eight pixels a side, in one tile of 2^15 pixels a side."""
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: 2**15, 323: 2**15, 324: 8, 325: 20}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 28) + bytes(20) + struct.pack("<H", len(tags)) + directory + bytes(4)


JPEG = saved(PICTURE, "JPEG")
TWO = {"save_all": True, "append_images": [PICTURE.rotate(90)]}
BOMBS = {
    "png of 2.5 gigapixels": png(50_000, 50_000),
    "png of 81 megapixels": png(9_000, 9_000),
    "png of the largest sides": png(2**31 - 1, 2**31 - 1),
    "png as a thin strip": png(2**25, 1),
    "png without width": png(0, 5),
    "jpeg of 4 gigapixels": patched(JPEG, JPEG.index(b"\xff\xc0") + 5, struct.pack(">HH", 65535, 65535)),
    "bmp of 1.6 gigapixels": patched(saved(PICTURE, "BMP"), 18, struct.pack("<ii", 40_000, 40_000)),
    "gif of 4 gigapixels": patched(saved(PICTURE, "GIF"), 6, struct.pack("<HH", 65535, 65535)),
    "ppm of 3.6 gigapixels": b"P6 60000 60000 255\n" + bytes(10),
    "webp of 268 megapixels": webp(16_383, 16_383),
    "webp of 4 gigapixels": webp(2**24, 255),
    "tiff with a tile of a gigapixel": tiled_tiff(),
    "gif that moves": saved(PICTURE, "GIF", **TWO),
    "png that moves": saved(PICTURE, "PNG", **TWO),
    "webp that moves": saved(PICTURE, "WEBP", **TWO),
    "tiff of two pages": saved(PICTURE, "TIFF", **TWO),
    "tiff of floats": saved(Image.new("F", (8, 8)), "TIFF"),
    "tiff of 32 bits": saved(Image.new("I", (8, 8)), "TIFF"),
    "tiff in another colour space": saved(Image.new("LAB", (8, 8)), "TIFF"),
    "an icon": saved(PICTURE, "ICO"),
    "postscript": saved(PICTURE, "EPS"),
    "text": b"not an image",
    "nothing": b"",
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BOMBS)
def test_an_image_that_cannot_be_used_is_named_with_its_place(name: str) -> None:
    with pytest.raises(DataError, match=r"^image must be readable: set row 7: .+") as caught:
        decode(BOMBS[name], "set row 7")
    assert "0x" not in str(caught.value), "no address of an object"


def test_none_of_them_takes_memory(tmp_path: Path) -> None:
    """In a process of its own, whose largest size is then that of the bombs and of nothing else."""
    for number, content in enumerate(BOMBS.values()):
        (tmp_path / str(number)).write_bytes(content)
    code = f"""
import resource, warnings
from pathlib import Path
from fedprompt.data.sources.base import decode
from fedprompt.errors import DataError
warnings.simplefilter("ignore")
def largest(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = largest()
for path in sorted(Path({str(tmp_path)!r}).iterdir()):
    try: decode(path, path.name)
    except DataError: continue
    raise SystemExit(f"{{path}} was read")
print((largest() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) < 32, "megabytes"


@pytest.mark.parametrize(
    "content",
    [
        *(saved(PICTURE, form) for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")),
        saved(PICTURE, "MPO", **TWO),
        *(saved(PICTURE.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGBA")),
        saved(PICTURE.convert("CMYK"), "JPEG"),
    ],
)
def test_ordinary_images_of_every_promised_kind_are_read(content: bytes) -> None:
    assert (decode(content, "here").size, decode(content, "here").mode) == ((8, 8), "RGB")


@pytest.mark.parametrize("form", ["PNG", "PPM", "TIFF"])
def test_sixteen_bits_of_grey_are_scaled_in_every_format(form: str) -> None:
    grey = Image.fromarray(np.full((4, 4), 60_000, dtype=np.uint16))
    assert decode(saved(grey, form), "here").getpixel((0, 0)) == (233, 233, 233)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow thinks aloud about damaged TIFF tags
@settings(max_examples=300)
@given(st.data())
def test_damaged_images_are_read_or_refused(data: st.DataObject) -> None:
    good = saved(PICTURE, data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF"])))
    damaged = bytearray(good[: data.draw(st.integers(0, len(good)))])
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        assert decode(bytes(damaged), "here").mode == "RGB"


def written(path: Path, columns: dict[str, Any], **metadata: str) -> Path:
    table = pa.table({"image": [b"x"] * len(next(iter(columns.values()))), **columns})
    pq.write_table(table.replace_schema_metadata(metadata or None), path)
    return path


@pytest.mark.parametrize(
    "columns",
    [
        {"label": [0, 2**62]},
        {"label": pa.array([0, 2**64 - 1], pa.uint64())},
        {"label": [0, -1]},
        {"label": [0.5, 1.5]},
        {"label": [[0], [1]]},
        {"label": [{"a": 1}, {"a": 2}]},
        {"label": [0, None]},
        {"label": [0, 1], "split": [["train"], ["test"]]},
        {"label": [0, 1], "split": ["train", None]},
        {"label": [0, 1], "rank": [0, None]},
        {"label": [0, 1], "rank": ["first", "second"]},
        {"label": [0, 1], "rank": pa.array([0, 2**64 - 1], pa.uint64())},
        {"label": [0, 1], "domain": [2**62, 0]},
    ],
)
def test_parquet_columns_of_odd_values_are_refused(columns: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError):
        ParquetSource(written(tmp_path / "set.parquet", columns), tmp_path / "cache")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("fedprompt", "{}"),
        ("fedprompt", "["),
        ("fedprompt", '{"classes": 3, "domains": []}'),
        ("fedprompt", "[" * 9999),
        ("huggingface", "[]"),
        ("huggingface", '{"info": 3}'),
        ("huggingface", '{"info": {"features": {"label": {"names": [1]}}}}'),
    ],
)
def test_parquet_metadata_that_is_odd_is_refused(key: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metadata"):
        ParquetSource(written(tmp_path / "set.parquet", {"label": [0, 1]}, **{key: text}), tmp_path / "cache")


@pytest.mark.parametrize("text", ["[]", '{"classes": "ab"}', "[" * 9999, '{"classes": [], "classes": []}'])
def test_names_beside_a_parquet_file_that_are_odd_are_refused(text: str, tmp_path: Path) -> None:
    path = written(tmp_path / "set.parquet", {"label": [0, 1]})
    path.with_suffix(".json").write_text(text)
    with pytest.raises(DataError, match=r"set\.json"):
        ParquetSource(path, tmp_path / "cache")


def test_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    pq.write_table(pa.table([pa.array([b"x"]), pa.array([0]), pa.array([1])], names=["image", "label", "label"]), path)
    with pytest.raises(DataError, match="different names"):
        ParquetSource(path, tmp_path / "cache")


def test_few_bytes_cannot_stand_for_many_rows(tmp_path: Path) -> None:
    """A run-length code tells a million equal rows in a few bytes."""
    path = tmp_path / "set.parquet"
    rows = 1_000_000
    table = pa.table({"image": pa.nulls(rows, pa.binary()), "label": np.zeros(rows, dtype=np.int8)})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match="rows must be no more than the"):
        ParquetSource(path, tmp_path / "cache")


def test_a_long_name_in_many_rows_is_kept_once(tmp_path: Path) -> None:
    name, rows = "n" * 50_000, 2_000
    indices = pa.array(np.zeros(rows, dtype=np.int32))
    label = pa.DictionaryArray.from_arrays(indices, pa.array([name]))
    path = tmp_path / "set.parquet"
    pq.write_table(pa.table({"image": [b"x"] * rows, "label": label}).cast(_plain_names()), path, compression="none")
    before = pa.total_allocated_bytes()
    source = ParquetSource(path, tmp_path / "cache")
    assert source.class_names == (name,)
    assert len(source) == rows
    assert pa.total_allocated_bytes() - before < 20 * 2**20, "a hundred when every row has its own"


def _plain_names() -> pa.Schema:
    return pa.schema([("image", pa.binary()), ("label", pa.large_string())])


def test_a_row_group_that_grows_out_of_proportion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = saved(PICTURE, "BMP") + os.urandom(20_000)
    path = tmp_path / "set.parquet"
    pq.write_table(pa.table({"image": [image] * 2_000, "label": [0] * 2_000}), path)
    assert path.stat().st_size < 2**20
    assert ParquetSource(path, tmp_path / "cache").image(1_999).size == (8, 8)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 2**20)
    with pytest.raises(DataError, match=r"rows 0\.\.1999: must have at most 1048576 bytes of images"):
        ParquetSource(path, tmp_path / "cache").image(0)


@settings(max_examples=100)
@given(data=st.data())
def test_damaged_parquet_files_are_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = written(folder / "set.parquet", {"label": ["a", "b"] * 5, "rank": list(range(10))})
    damaged = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    with contextlib.suppress(DataError):
        ParquetSource(path, folder / "cache").image(0)


def image_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(saved(PICTURE, "PNG"))
    return path


def test_links_in_circles_end(tmp_path: Path) -> None:
    image_file(tmp_path / "set" / "cat" / "a.png")
    for name in ("one", "two", "three"):
        (tmp_path / "set" / "cat" / name).symlink_to(tmp_path / "set" / "cat", target_is_directory=True)
    with pytest.raises(DataError, match="hold images as class/image only"):
        FolderSource(tmp_path / "set", domains=False, cache=tmp_path / "cache")


def test_a_file_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    image_file(tmp_path / "set" / "cat" / "a.png")
    try:
        image_file(Path(os.fsdecode(os.fsencode(tmp_path / "set" / "cat") + b"/\xff.png")))
    except OSError:
        pytest.skip("this file system takes text only")
    with pytest.raises(DataError, match="UTF-8"):
        FolderSource(tmp_path / "set", domains=False, cache=tmp_path / "cache")


@pytest.mark.parametrize("names", [b"\xff\xfe", b"n\n" * 2**20])
def test_cifar_names_that_are_no_short_text_are_refused(names: bytes, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073))
    (tmp_path / "batches.meta.txt").write_bytes(names)
    with pytest.raises(DataError, match=r"batches\.meta\.txt"):
        CifarSource(tmp_path, "cifar10", tmp_path / "cache")


def test_the_json_of_names_has_a_limit(tmp_path: Path) -> None:
    path = written(tmp_path / "set.parquet", {"label": [0, 1]})
    path.with_suffix(".json").write_text(json.dumps({"classes": ["a" * 2**24]}))
    with pytest.raises(DataError, match="at most 16777216 bytes"):
        ParquetSource(path, tmp_path / "cache")
