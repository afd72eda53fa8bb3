"""Ways in, and what is said when one of them is barred."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import throwaway_cache

from fedprompt.assets import prepare
from fedprompt.backbones import load_backbone
from fedprompt.backbones.catalog import FAMILIES
from fedprompt.backbones.position_embedding import interpolate
from fedprompt.backbones.random_weights import random_weights
from fedprompt.backbones.shape import ViTShape
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, StorageError
from fedprompt.io.files import cache_directory

pytestmark = pytest.mark.unit

HALF = (0.5, 0.5, 0.5)
SHAPE = ViTShape(width=192, depth=1, heads=3, mlp_width=64, patch=4, image_size=8)
SHARED = Path(__file__).parents[3].parent / "shared" / "weights" / "vit_tiny_patch16_224.safetensors"


def timm_tensors(shape: ViTShape = SHAPE) -> dict[str, torch.Tensor]:
    """The canonical random weights under the names a timm file has."""
    names = {
        "patch.": "patch_embed.proj.",
        "attention.in": "attn.qkv",
        "attention.out": "attn.proj",
        "mlp.in": "mlp.fc1",
        "mlp.out": "mlp.fc2",
    }
    tensors = {}
    for name, tensor in random_weights(shape, seed=4).items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    lead, position = tensors.pop("lead"), tensors.pop("position")
    tensors["cls_token"] = torch.zeros(1, 1, shape.width)
    tensors["pos_embed"] = torch.cat([lead, position])[None]
    return tensors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(timm_tensors(), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=8, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    return tmp_path


def load(name: Path | str, **settings):
    return load_backbone(BackboneConfig(name=str(name), **settings), throwaway_cache())


def test_the_shape_of_a_timm_file_is_read_from_its_tensors(file):
    assert load(file, mean=HALF, std=HALF).shape == SHAPE


def test_a_timm_file_keeps_every_value(file):
    weights, expected = load(file, mean=HALF, std=HALF).weights, random_weights(SHAPE, seed=4)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_classification_head_is_left_out(tmp_path):
    save_file(
        timm_tensors() | {"head.weight": torch.zeros(5, 192), "head.bias": torch.zeros(5)}, tmp_path / "a.safetensors"
    )
    assert not any("head" in name for name in load(tmp_path / "a.safetensors", mean=HALF, std=HALF).weights)


@pytest.mark.parametrize("field", ["mean", "std"])
def test_a_bare_file_needs_its_preprocessing_stated(file, field):
    given = {"mean": HALF, "std": HALF}
    del given[field]
    with pytest.raises(BackboneError, match=rf"backbone\.{field} must be given"):
        load(file, **given)


def test_a_folder_without_preprocessing_needs_it_stated(folder):
    with pytest.raises(BackboneError, match=r"backbone\.mean must be given"):
        load(folder)


def test_a_stated_mean_that_differs_from_the_folders_own_is_refused_with_both(folder):
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3})
    )
    with pytest.raises(
        BackboneError, match=r"backbone\.mean must be the backbone's own \(0\.1, 0\.2, 0\.3\), got \(0\.5"
    ):
        load(folder, mean=HALF)


def test_a_stated_mean_that_agrees_is_accepted(folder):
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3})
    )
    assert load(folder, mean=(0.1, 0.2, 0.3)).mean == (0.1, 0.2, 0.3)


def test_the_named_backbone_does_not_take_another_mean():
    with pytest.raises(
        BackboneError, match=r"backbone\.mean must be the backbone's own \(0\.5, 0\.5, 0\.5\), got \(0\.4"
    ):
        load("tiny", mean=(0.4, 0.5, 0.5))


def test_a_preprocessor_with_another_rescaling_is_refused(folder):
    values = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 127.5}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    with pytest.raises(BackboneError, match="rescale_factor"):
        load(folder)


def test_a_standard_deviation_of_zero_is_refused(file):
    with pytest.raises(BackboneError, match=r"backbone\.std must be positive"):
        load(file, mean=HALF, std=(0.5, 0.0, 0.5))


def test_the_right_checksum_is_accepted(file):
    load(file, mean=HALF, std=HALF, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_wrong_checksum_is_refused_with_both(kind, file, folder):
    path = {"file": file, "folder": folder}[kind]
    with pytest.raises(BackboneError, match=r"backbone\.sha256 of .* must be 0{64}, got [0-9a-f]{64}"):
        load(path, mean=HALF, std=HALF, sha256="0" * 64)


def test_an_image_size_that_cuts_patches_is_refused(file):
    with pytest.raises(BackboneError, match=r"backbone\.image_size must be a multiple of the patch side 4, got 10"):
        load(file, mean=HALF, std=HALF, image_size=10)


def test_a_truncated_file_is_refused(file):
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BackboneError, match="must be an intact safetensors file"):
        load(file, mean=HALF, std=HALF)


def test_a_file_that_is_not_safetensors_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"hello, this is no weight file")
    with pytest.raises(BackboneError, match="must be an intact safetensors file"):
        load(tmp_path / "a.safetensors", mean=HALF, std=HALF)


def test_weights_of_another_kind_of_model_are_refused(tmp_path):
    save_file({"transformer.h.0.attn.c_attn.weight": torch.zeros(3, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(BackboneError, match=r"must be those of a ViT.*transformer\.h\.0"):
        load(tmp_path / "a.safetensors", mean=HALF, std=HALF)


def test_a_norm_nobody_expects_is_refused(tmp_path):
    save_file(timm_tensors() | {"blocks.0.attn.q_norm.weight": torch.ones(64)}, tmp_path / "a.safetensors")
    with pytest.raises(BackboneError, match="q_norm"):
        load(tmp_path / "a.safetensors", mean=HALF, std=HALF)


def test_a_missing_tensor_is_named(tmp_path):
    tensors = timm_tensors()
    del tensors["blocks.0.norm2.bias"]
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(BackboneError, match=r"they lack 'blocks\.0\.norm2\.bias'"):
        load(tmp_path / "a.safetensors", mean=HALF, std=HALF)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    tensors = timm_tensors()
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(BackboneError, match=r"'norm\.weight' must be finite"):
        load(tmp_path / "a.safetensors", mean=HALF, std=HALF)


def test_a_width_that_does_not_tell_its_heads_is_refused(tmp_path):
    shape = ViTShape(width=1280, depth=1, heads=16, mlp_width=8, patch=2, image_size=4)
    save_file(timm_tensors(shape), tmp_path / "a.safetensors")
    with pytest.raises(BackboneError, match=r"width 1280 does not say its attention heads: use a folder"):
        load(tmp_path / "a.safetensors", mean=HALF, std=HALF)


def test_weights_that_do_not_fit_their_config_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(BackboneError, match=r"mlp\.in\.weight' must have shape \(64, 32\), got \(48, 32\)"):
        load(folder, mean=HALF, std=HALF)


def test_a_folder_with_only_pickle_is_refused_with_advice(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BackboneError, match=r"only 'pytorch_model\.bin', a pickle.*save_pretrained"):
        load(folder, mean=HALF, std=HALF)


def test_a_pickle_file_is_refused_without_being_opened(tmp_path):
    with pytest.raises(BackboneError, match="must not be a pickle file"):
        load(tmp_path / "does-not-exist.pth", mean=HALF, std=HALF)


def test_a_folder_of_another_model_type_is_refused(tmp_path):
    transformers.GPT2Config().save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BackboneError, match=rf"model_type in .* must be one of {', '.join(FAMILIES)}, got 'gpt2'"):
        load(tmp_path, mean=HALF, std=HALF)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(BackboneError, match=r"must hold a config\.json"):
        load(folder, mean=HALF, std=HALF)


def test_a_shard_outside_the_folder_is_refused(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BackboneError, match="files in the same folder"):
        load(folder, mean=HALF, std=HALF)


def test_a_missing_file_is_named():
    with pytest.raises(BackboneError, match=r"existing safetensors file, got 'nowhere\.safetensors'"):
        load("nowhere.safetensors", mean=HALF, std=HALF)


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(
        BackboneError,
        match=r"one of dinov2-small, mini, b16, minilm, tiny, tiny-clip, tiny-bert, an existing folder.*got 'resnet'",
    ):
        load("resnet")


def test_a_hub_model_out_of_reach_comes_with_advice(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BackboneError, match=r"(?s)could not be had from the hub.*copy the folder here"):
        load("nobody/no-such-model")


def test_a_device_torch_does_not_know_is_refused():
    with pytest.raises(BackboneError, match=r"backbone\.device must be a device this torch can use, got 'cuda:97'"):
        load("tiny", device="cuda:97")


def test_positions_are_untouched_at_their_own_grid():
    positions = torch.randn(9, 4)
    assert interpolate(positions, 3, antialias=True) is positions


def test_constant_positions_stay_constant_at_any_grid():
    torch.testing.assert_close(interpolate(torch.full((9, 2), 3.0), 5, antialias=False), torch.full((25, 2), 3.0))


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_file(), reason="the development weights are not beside the project")
def test_half_precision_timm_weights_load_in_single_precision():
    vit = load(SHARED, mean=HALF, std=HALF, image_size=96)
    assert (vit.shape.depth, vit.shape.heads, vit.shape.grid, vit.native_image_size) == (12, 3, 6, 224)
    assert vit.dtype == torch.float32


@pytest.fixture(scope="module")
def dinov2_file() -> Path:
    try:
        return prepare("dinov2-small", cache_directory())
    except (BackboneError, StorageError) as error:
        pytest.skip(f"the asset dinov2-small cannot be had here: {error}")


@pytest.mark.assets
def test_dinov2_small_equals_transformers_with_the_same_weights(dinov2_file):
    vit = load_backbone(BackboneConfig(name="dinov2-small", image_size=70), cache_directory())
    model = transformers.Dinov2Model(
        transformers.Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14)
    ).eval()
    state = model.state_dict()
    renames = {"blocks.": "encoder.layer.", "attn.proj": "attention.o_proj", "ls1.gamma": "layer_scale1.lambda1"}
    renames |= {"ls2.gamma": "layer_scale2.lambda1", "patch_embed.proj": "embeddings.patch_embeddings.projection"}
    renames |= {"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings"}
    given = {}
    for name, tensor in load_file(dinov2_file).items():
        name = f"layer{name}" if name.startswith("norm.") else name
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        parts = tensor.chunk(3) if "attn.qkv" in name else (tensor,)
        names = [name.replace("attn.qkv", f"attention.{part}_proj") for part in "qkv"] if len(parts) == 3 else [name]
        given |= dict(zip(names, parts, strict=True))
    assert state.keys() - given.keys() == {"embeddings.mask_token"}
    model.load_state_dict(given, strict=False)
    images = torch.randn(2, 3, 70, 70, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images).last_hidden_state[:, 0]
    seen = vit.run(vit.embed(images))["cls"]
    assert (seen - expected).norm() / expected.norm() < 1e-5


@pytest.mark.assets
def test_dinov2_small_carries_its_preprocessing(dinov2_file):
    vit = load_backbone(BackboneConfig(name="dinov2-small", image_size=28), cache_directory())
    assert (vit.mean, vit.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (vit.native_image_size, vit.shape.layer_scale) == (518, True)
