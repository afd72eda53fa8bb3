"""Kept backbones are the assembled ones, or they are assembled again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel

from fedprompt.backbones import weight_cache
from fedprompt.backbones.clip import folder_tokenizer
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.random_weights import random_vit, random_weights, tiny_clip
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_cache import identity, kept
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError
from fedprompt.io.cache_key import NAME

pytestmark = pytest.mark.unit

SHAPE = ViTShape(width=32, depth=2, heads=2, mlp_width=64, patch=4, image_size=8)
CONFIG = BackboneConfig(name="mine")


class Workshop:
    """One source file, a cache, and a count of how often a backbone was made of it."""

    def __init__(self, folder: Path) -> None:
        self.source, self.cache, self.built = folder / "source.safetensors", folder / "cache", 0
        self.write(0)

    def write(self, seed: int) -> None:
        save_file(random_weights(SHAPE, seed), self.source)

    def open(self, config: BackboneConfig = CONFIG, build: Callable[[], ViT] | None = None) -> ViT:
        def counted() -> ViT:
            self.built += 1
            return build() if build else self.build()

        return kept(config, [self.source], self.cache, counted)

    def build(self) -> ViT:
        tensors, _ = weight_cache.read_described(self.source)
        return ViT("mine", SHAPE, (0.1, 0.2, 0.3), (0.5, 0.5, 0.4), tensors, native_image_size=8, stem=1)

    @property
    def files(self) -> list[Path]:
        folder = self.cache / weight_cache.FOLDER
        return sorted(path for path in folder.iterdir() if path.name != NAME) if folder.is_dir() else []


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    return Workshop(tmp_path)


def dual() -> DualEncoder:
    return tiny_clip(random_vit())


def test_a_kept_vision_transformer_is_the_one_that_was_built(workshop):
    first, again, built = workshop.open(), workshop.open(), workshop.build()
    assert workshop.built == 1
    for found in (first, again):
        assert found.digest() == built.digest()
        assert (found.name, found.shape, found.mean, found.std) == ("mine", SHAPE, (0.1, 0.2, 0.3), (0.5, 0.5, 0.4))
        assert (found.native_image_size, found.stem) == (8, 1)
        assert all(torch.equal(found.weights[name], tensor) for name, tensor in built.weights.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_precision_is_kept_as_it_is(workshop, dtype):
    expected = random_vit(dtype=dtype)
    workshop.open(build=lambda: expected)
    found = workshop.open(build=lambda: expected)
    assert workshop.built == 1
    assert found.dtype == dtype
    assert found.digest() == expected.digest()


def test_a_kept_dual_encoder_speaks_like_the_one_that_was_built(workshop):
    workshop.open(build=dual)
    found, expected = workshop.open(build=dual), dual()
    assert workshop.built == 1
    assert isinstance(found, DualEncoder)
    assert (found.digest(), found.scale) == (expected.digest(), expected.scale)
    names = ["golden retriever", "Größe (rare)", "x " * 20]
    assert found.text.names(names).ids == expected.text.names(names).ids
    context = found.text.words("a photo of a")
    assert torch.equal(found.encode_classes(context, names), expected.encode_classes(context, names))


OPEN = """
import sys
from pathlib import Path
from fedprompt.backbones import load_backbone, weight_cache
from fedprompt.config import BackboneConfig
weight_cache.LEAST_BYTES = 0
found = load_backbone(BackboneConfig(name=sys.argv[1]), Path(sys.argv[2]))
print(found.digest(), found.text.names(["grey cat"]).ids, "transformers" in sys.modules)
"""


def test_a_clip_folder_is_opened_without_transformers_once_it_is_kept(tmp_path):
    folder = tmp_path / "clip"
    tower = {"num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2, "hidden_size": 8}
    ends = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513}
    config = transformers.CLIPConfig(
        vision_config={**tower, "image_size": 8, "patch_size": 4}, text_config={**tower, **ends}, projection_dim=8
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    transformers.CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    command = [sys.executable, "-c", OPEN, str(folder), str(tmp_path / "cache")]
    first, again = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.rsplit(maxsplit=1) for _ in range(2)
    )
    assert first[0] == again[0]
    assert (first[1], again[1]) == ("True", "False")


def test_a_tokenizer_of_another_library_is_refused(tmp_path, monkeypatch):
    class Slow:
        bos_token_id, eos_token_id = 1, 2

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: Slow())
    with pytest.raises(BackboneError, match="must be one of the tokenizers library, got Slow"):
        folder_tokenizer(tmp_path)


def test_weights_are_mapped_and_writing_to_them_leaves_the_file_alone(workshop):
    workshop.open()
    found = workshop.open()
    (file,) = workshop.files
    before = file.read_bytes()
    assert str(file) in Path("/proc/self/maps").read_text()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.weights.values())
    found.weights["norm.weight"].zero_()
    assert file.read_bytes() == before
    with pytest.raises(BackboneError, match="must stay frozen"):
        found.assert_frozen(identity(found))


def test_a_source_that_changed_is_read_again_even_when_its_size_and_time_did_not(workshop):
    status = workshop.source.stat()
    first = workshop.open().digest()
    workshop.write(seed=1)
    os.utime(workshop.source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert workshop.source.stat().st_size == status.st_size
    assert workshop.open().digest() != first
    assert workshop.built == 2


@pytest.mark.parametrize("change", [{"image_size": 16}, {"stem": 1}, {"dtype": "float64"}, {"sha256": "0" * 64}])
def test_another_setting_is_another_backbone(workshop, change):
    workshop.open()
    workshop.open(CONFIG.model_copy(update=change))
    assert workshop.built == 2


def test_where_and_how_it_runs_makes_no_other_file(workshop):
    workshop.open()
    workshop.open(CONFIG.model_copy(update={"autocast": True}))
    assert workshop.built == 1


def test_code_that_changed_makes_another_file(workshop, monkeypatch):
    workshop.open()
    monkeypatch.setattr(weight_cache, "code_digest", lambda: "other")
    workshop.open()
    assert workshop.built == 2


def damaged_at(share: float) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        position = min(int(share * len(content)), len(content) - 1)
        return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]

    return damage


def another_word(content: bytes) -> bytes:
    """A tokenizer that is still well-formed, with two letters of one word swapped."""
    assert content.count(b"startoftext")
    return content.replace(b"startoftext", b"startofetxt")


@pytest.mark.parametrize(
    "damage",
    [
        *(damaged_at(share) for share in (0, 0.01, 0.1, 0.25, 0.5, 0.75, 1)),
        another_word,
        lambda content: content[: len(content) // 2],
        lambda content: content + b"more",
        lambda content: b"",
        lambda content: bytes(len(content)),
    ],
)
def test_a_damaged_file_is_made_again(workshop, damage):
    expected = workshop.open(build=dual).digest()
    (file,) = workshop.files
    intact = file.read_bytes()
    file.unlink()  # a new file, not the pages of the one that is mapped
    file.write_bytes(damage(intact))
    found = workshop.open(build=dual)
    assert workshop.built == 2
    assert found.digest() == expected
    assert file.read_bytes() == intact


def test_a_file_that_describes_itself_wrongly_is_made_again(workshop):
    """Whole, with a code that fits, but not what this program writes."""
    workshop.open()
    (file,) = workshop.files
    tensors, metadata = weight_cache.read_described(file)
    text = json.dumps({**json.loads(metadata["backbone"]), "stem": 0})
    copy = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copy, file, metadata={"backbone": text, "mac": weight_cache._code(file, text)})
    assert workshop.open().stem == 1
    assert workshop.built == 2


def test_weights_that_a_stranger_put_there_are_not_used(workshop):
    """Other tensors, with the digest that belongs to them, in a file that lacks nothing but the owner's code."""
    expected = workshop.open().digest()
    (file,) = workshop.files
    tensors, metadata = weight_cache.read_described(file)
    forged = {name: tensor + 1 for name, tensor in tensors.items()}
    described = json.loads(metadata["backbone"])
    parts = {name.removeprefix("vision/"): tensor for name, tensor in forged.items()}
    described["digest"] = ViT("mine", SHAPE, (0.1, 0.2, 0.3), (0.5, 0.5, 0.4), parts, 8, stem=1).digest()
    save_file(forged, file, metadata={"backbone": json.dumps(described), "mac": metadata["mac"]})
    assert workshop.open().digest() == expected
    assert workshop.built == 2


def test_small_backbones_are_not_kept(tmp_path):
    workshop = Workshop(tmp_path)
    workshop.open()
    workshop.open()
    assert workshop.built == 2
    assert workshop.files == []


def test_a_cache_that_cannot_be_written_only_costs_time(workshop):
    workshop.cache.write_text("no folder")
    assert workshop.open().digest() == workshop.open().digest() == workshop.build().digest()
    assert workshop.built == 2


def test_a_tokenizer_that_cannot_be_written_down_is_not_kept(workshop):
    whole = dual()
    object.__setattr__(whole.text, "tokenise", lambda text: [1, 2])
    assert workshop.open(build=lambda: whole) is whole
    assert workshop.files == []


def test_a_source_that_is_fetched_while_building_is_known_the_next_time(workshop):
    workshop.source.unlink()

    def fetch() -> ViT:
        workshop.write(0)
        return workshop.build()

    workshop.open(build=fetch)
    workshop.open(build=fetch)
    assert workshop.built == 1


def test_a_source_that_changes_while_building_is_not_kept(workshop):
    def changing() -> ViT:
        built = workshop.build()
        workshop.source.unlink()
        workshop.write(seed=1)
        return built

    workshop.open(build=changing)
    assert workshop.files == []


def test_an_error_while_building_is_the_callers(workshop):
    def fail() -> ViT:
        raise BackboneError("no such weights")

    with pytest.raises(BackboneError, match="no such weights"):
        workshop.open(build=fail)
    assert workshop.files == []


def test_files_opened_longest_ago_make_room(workshop, monkeypatch):
    for size in (8, 16, 24):
        workshop.open(CONFIG.model_copy(update={"image_size": size}))
        newest = max(workshop.files, key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, ns=(size, size))
    oldest, middle, _ = sorted(workshop.files, key=lambda path: path.stat().st_mtime_ns)
    workshop.open(CONFIG.model_copy(update={"image_size": 8}))  # and the oldest is the newest
    assert workshop.built == 3
    monkeypatch.setattr(weight_cache, "MOST_BYTES", 2 * middle.stat().st_size)
    workshop.open(CONFIG.model_copy(update={"image_size": 32}))
    assert not middle.exists()
    assert oldest.exists()
    assert len(workshop.files) == 3  # the bound, and the one that came


def test_the_identity_is_taken_once_and_the_digest_every_time(workshop):
    found = workshop.open()
    before = identity(found)
    assert before == found.digest()
    found.weights["norm.weight"].add_(1)
    assert identity(found) == before
    assert found.digest() != before
