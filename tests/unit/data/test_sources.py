"""Sources: what is found, in which order, and what is said when something is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedprompt.config import DataConfig
from fedprompt.data.sources.open import Source, detect_format, open_source
from fedprompt.errors import DataError

pytestmark = pytest.mark.unit
SHARED = Path(__file__).resolve().parents[3].parent / "shared"


def encoded(value: int, size: tuple[int, int] = (12, 8)) -> bytes:
    """A PNG of one grey value."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def write_images(root: Path, names: list[str]) -> None:
    for value, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(value))


def write_parquet(path: Path, rows: int = 12, **columns: object) -> Path:
    """Rows of grey images with two classes; further columns replace or add to the defaults."""
    table = {"image": [encoded(row) for row in range(rows)], "label": [row % 2 for row in range(rows)], **columns}
    pq.write_table(
        pa.table({name: values for name, values in table.items() if values is not None}), path, row_group_size=5
    )
    return path


def write_cifar10(root: Path, per_batch: int = 20) -> np.ndarray:
    """One training batch and the test batch in the binary form; returns the training records."""
    generator = np.random.default_rng(0)
    records = generator.integers(0, 256, size=(per_batch, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(per_batch) % 10
    root.mkdir(parents=True, exist_ok=True)
    (root / "data_batch_1.bin").write_bytes(records.tobytes())
    (root / "test_batch.bin").write_bytes(records[:10].tobytes())
    (root / "batches.meta.txt").write_text("\n".join(f"class{label}" for label in range(10)) + "\n\n")
    return records


def opened(path: Path | str, cache: Path, form: str = "auto") -> Source:
    return open_source(DataConfig(source=str(path), format=form), cache)


def grey(source: Source, index: int) -> int:
    return source.image(index).getpixel((0, 0))[0]


def test_tiny_has_twelve_training_and_six_test_images_per_cell(cache):
    source = opened("tiny", cache)
    cells = source.domains * 5 + source.labels
    assert np.bincount(cells[source.splits == "train"]).tolist() == [12] * 20
    assert np.bincount(cells[source.splits == "test"]).tolist() == [6] * 20
    assert source.image(0).size == (16, 16)


def test_tiny_is_the_same_every_time(cache):
    assert opened("tiny", cache).fingerprint == opened("tiny", cache).fingerprint


def test_tiny_is_learnable_from_class_means(cache):
    source = opened("tiny", cache)
    pixels = np.stack([np.asarray(source.image(index), dtype=float).ravel() for index in range(len(source))])
    right = []
    for domain in range(4):
        here = source.domains == domain
        train, test = here & (source.splits == "train"), here & (source.splits == "test")
        means = np.stack([pixels[train & (source.labels == label)].mean(axis=0) for label in range(5)])
        nearest = ((pixels[test][:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
        right += (nearest == source.labels[test]).tolist()
    assert np.mean(right) > 0.8  # chance is 0.2


def test_image_folder_takes_classes_from_folder_names(tmp_path, cache):
    write_images(tmp_path / "set", ["cat/b.png", "cat/a.png", "ant/x.png"])
    source = opened(tmp_path / "set", cache)
    assert detect_format(str(tmp_path / "set")) == "folder"
    assert source.class_names == ("ant", "cat")
    assert source.labels.tolist() == [0, 1, 1]
    assert [grey(source, index) for index in range(3)] == [2, 1, 0]  # sorted by path
    assert (source.domain_names, source.splits) == (("all",), None)


def test_image_folder_with_splits_keeps_them(tmp_path, cache):
    write_images(tmp_path / "set", ["train/cat/a.png", "train/ant/a.png", "test/cat/a.png", "val/ant/a.png"])
    source = opened(tmp_path / "set", cache)
    assert source.class_names == ("ant", "cat")
    assert source.splits.tolist() == ["test", "train", "train", "val"]


def test_domain_folder_takes_domains_and_classes(tmp_path, cache):
    write_images(tmp_path / "set", ["photo/cat/a.png", "photo/ant/a.png", "art/cat/a.png"])
    source = opened(tmp_path / "set", cache)
    assert detect_format(str(tmp_path / "set")) == "domain_folder"
    assert source.domain_names == ("art", "photo")
    assert source.domains.tolist() == [0, 1, 1]
    assert source.labels.tolist() == [1, 0, 1]


def test_a_class_folder_without_images_still_names_a_class(tmp_path, cache):
    write_images(tmp_path / "set", ["cat/a.png"])
    (tmp_path / "set" / "dog").mkdir()
    assert opened(tmp_path / "set", cache).class_names == ("cat", "dog")


def test_folder_identity_follows_content_not_place_or_time(tmp_path, cache):
    for name in ("one", "two"):
        write_images(tmp_path / name, ["cat/a.png", "dog/a.png"])
    first, second = opened(tmp_path / "one", cache), opened(tmp_path / "two", cache)
    assert first.fingerprint == second.fingerprint
    (tmp_path / "two/cat/a.png").write_bytes(encoded(77))
    assert opened(tmp_path / "two", cache).fingerprint != first.fingerprint


def test_a_corrupt_image_file_is_named(tmp_path, cache):
    write_images(tmp_path / "set", ["cat/a.png", "dog/a.png"])
    (tmp_path / "set/dog/a.png").write_bytes(encoded(3)[:40])
    with pytest.raises(DataError, match=r"image must be readable: .*set/dog/a\.png"):
        opened(tmp_path / "set", cache).image(1)


def test_a_missing_folder_is_named(tmp_path, cache):
    with pytest.raises(DataError, match=r"data\.source must be .* an existing path, got '.*absent'"):
        opened(tmp_path / "absent", cache)


def test_an_empty_folder_is_an_error(tmp_path, cache):
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError, match=r"data\.source must hold images as class/image, got '.*no image found"):
        opened(tmp_path / "set", cache)


def test_images_at_mixed_depths_are_an_error(tmp_path, cache):
    write_images(tmp_path / "set", ["cat/a.png", "dog/deep/a.png"])
    with pytest.raises(DataError, match=r"hold images as class/image only, got '.*dog/deep/a\.png'"):
        opened(tmp_path / "set", cache)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path, cache):
    (tmp_path / "set/cat").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 128 * 257, dtype=np.uint16)).save(tmp_path / "set/cat/a.png")
    assert grey(opened(tmp_path / "set", cache), 0) == 128


def test_parquet_reads_images_across_row_groups(tmp_path, cache):
    source = opened(write_parquet(tmp_path / "set.parquet"), cache)
    assert [grey(source, index) for index in (11, 0, 5, 4, 10)] == [11, 0, 5, 4, 10]
    assert source.class_names == ("0", "1")
    assert source.labels.tolist() == [0, 1] * 6


def test_parquet_takes_names_from_the_json_beside_it(tmp_path, cache):
    path = write_parquet(tmp_path / "set.parquet", domain=[0] * 6 + [1] * 6)
    path.with_suffix(".json").write_text(json.dumps({"classes": ["cat", "dog", "none"], "domains": ["art", "photo"]}))
    source = opened(path, cache)
    assert (source.class_names, source.domain_names) == (("cat", "dog", "none"), ("art", "photo"))
    assert source.domains.tolist() == [0] * 6 + [1] * 6


def test_parquet_reads_names_splits_and_ranks(tmp_path, cache):
    path = write_parquet(
        tmp_path / "set.parquet",
        label=["dog", "cat"] * 6,
        domain=["photo"] * 12,
        split=pa.array(["train"] * 8 + ["validation", "val", "test", "test"]).dictionary_encode(),
        rank=list(range(12)),
    )
    source = opened(path, cache)
    assert source.class_names == ("cat", "dog")
    assert source.labels.tolist() == [1, 0] * 6
    assert source.splits.tolist() == ["train"] * 8 + ["val", "val", "test", "test"]
    assert source.ranks.tolist() == list(range(12))


def test_parquet_of_the_datasets_library_is_understood(tmp_path, cache):
    images = [{"bytes": encoded(row), "path": None} for row in range(4)]
    table = pa.table({"image": images, "label": [0, 1, 0, 1]})
    features = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / "set.parquet")
    source = opened(tmp_path / "set.parquet", cache)
    assert source.class_names == ("cat", "dog")
    assert grey(source, 3) == 3


def test_a_corrupt_image_names_its_parquet_row(tmp_path, cache):
    images = [encoded(row) for row in range(12)]
    images[7] = images[7][:30]
    source = opened(write_parquet(tmp_path / "set.parquet", image=images), cache)
    with pytest.raises(DataError, match=r"image must be readable: set\.parquet row 7"):
        source.image(7)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": None}, "parquet columns must include 'label', got ['image']"),
        ({"label": [0, 1, None] * 4}, "set.parquet row 2: label must be an integer or a name, got None"),
        ({"label": [0, -1] * 6}, "set.parquet row 1: label must be in 0..0, got -1"),
        ({"split": ["train"] * 11 + ["other"]}, "set.parquet row 11: split must be one of"),
    ],
)
def test_bad_parquet_columns_name_row_rule_and_value(tmp_path, cache, columns, message):
    with pytest.raises(DataError) as caught:
        opened(write_parquet(tmp_path / "set.parquet", **columns), cache)
    assert message in str(caught.value)


def test_a_label_beyond_the_declared_classes_names_its_row(tmp_path, cache):
    path = write_parquet(tmp_path / "set.parquet", label=[0] * 11 + [2])
    path.with_suffix(".json").write_text(json.dumps({"classes": ["cat", "dog"]}))
    with pytest.raises(DataError, match=r"set\.parquet row 11: label must be in 0\.\.1, got 2"):
        opened(path, cache)


def test_a_file_that_is_not_parquet_is_an_error(tmp_path, cache):
    (tmp_path / "set.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"data\.source must be a readable parquet file: .*set\.parquet"):
        opened(tmp_path / "set.parquet", cache)


def test_parquet_identity_is_the_hash_of_the_file(tmp_path, cache):
    import hashlib

    path = write_parquet(tmp_path / "set.parquet")
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert opened(path, cache).fingerprint == expected
    assert opened(path, cache).fingerprint == expected  # from the note in the cache
    path = write_parquet(tmp_path / "set.parquet", rows=14)
    assert opened(path, cache).fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


def test_cifar_binary_is_read_record_by_record(tmp_path, cache):
    records = write_cifar10(tmp_path / "cifar")
    source = opened(tmp_path / "cifar", cache)
    assert (source.name, len(source), source.class_names[3]) == ("cifar10", 30, "class3")
    assert source.labels[:12].tolist() == [*range(10), 0, 1]
    assert (source.splits == "train").sum() == 20
    expected = records[17, 1:].reshape(3, 32, 32).transpose(1, 2, 0)
    assert (np.asarray(source.image(17)) == expected).all()


def test_cifar100_uses_the_fine_label(tmp_path, cache):
    records = np.zeros((4, 3074), dtype=np.uint8)
    records[:, 0], records[:, 1] = 1, [5, 6, 7, 8]
    (tmp_path / "train.bin").write_bytes(records.tobytes())
    (tmp_path / "test.bin").write_bytes(records.tobytes())
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"fine{label}" for label in range(100)))
    source = opened(tmp_path, cache)
    assert source.labels.tolist() == [5, 6, 7, 8, 5, 6, 7, 8]
    assert source.class_names[8] == "fine8"


def test_a_cut_off_cifar_file_is_named(tmp_path, cache):
    write_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"x" * 3000)
    with pytest.raises(DataError, match=r"size of test_batch\.bin must be a multiple of 3073 bytes .* got 3000"):
        opened(tmp_path, cache)


@pytest.mark.parametrize("names", [("data_batch_1", "test_batch"), ("train", "test", "meta")])
@pytest.mark.parametrize("form", ["auto", "cifar10", "cifar100"])
def test_pickled_cifar_is_refused_with_advice(tmp_path, cache, names, form):
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(DataError, match=r"must be the binary version .*-binary\.tar\.gz.* is a Python pickle"):
        opened(tmp_path, cache, form)


def test_a_saved_dataset_folder_opens_through_the_datasets_library(tmp_path, cache):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})

    def part(values: list[int]):
        rows = {
            "img": [{"bytes": encoded(value), "path": None} for value in values],
            "label": [value % 2 for value in values],
        }
        return datasets.Dataset.from_dict(rows, features=features)

    datasets.DatasetDict({"train": part([4, 5, 6]), "test": part([7, 8])}).save_to_disk(str(tmp_path / "saved"))
    source = opened(tmp_path / "saved", cache)
    assert (source.name, source.class_names) == ("saved", ("cat", "dog"))
    assert source.labels.tolist() == [0, 1, 0, 1, 0]
    assert source.splits.tolist() == ["train"] * 3 + ["test"] * 2
    assert [grey(source, index) for index in (4, 0, 2)] == [8, 4, 6]
    assert opened(tmp_path / "saved", cache).fingerprint == source.fingerprint


def test_a_dataset_with_one_split_has_no_split_of_its_own(tmp_path, cache):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": [{"bytes": encoded(value), "path": None} for value in range(3)], "label": ["b", "a", "b"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    source = opened(tmp_path / "saved", cache)
    assert source.splits is None
    assert source.labels.tolist() == [1, 0, 1]


def test_a_hub_id_that_cannot_be_loaded_says_what_to_do(cache, monkeypatch):
    pytest.importorskip("datasets")
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"cannot load 'nobody/no-such-set'.*save_to_disk"):
        opened("hub:nobody/no-such-set", cache)


def test_partition_and_manifest_do_not_import_torch():
    modules = "fedprompt.data.partition.divide, fedprompt.data.partition.manifest, fedprompt.data.sources.open"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.shared
def test_shared_pacs_opens_with_names_splits_and_ranks(cache):
    path = SHARED / "data" / "pacs.parquet"
    if not path.is_file():
        pytest.skip("the real image sets are not beside the repository")
    source = opened(path, cache)
    assert (len(source), source.class_names[2], source.domain_names[3]) == (9991, "giraffe", "sketch")
    assert ((source.splits == "train").sum(), source.ranks.min()) == (7993, 0)
    assert source.image(9990).size == (224, 224)
    assert source.fingerprint == json.loads(path.with_suffix(".json").read_text())["files"]["pacs.parquet"]["sha256"]
