"""Every family gives what `transformers` gives for the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from naive import as_tensor
from safetensors.torch import save_file
from torch import Tensor

from fedprompt.backbones import load_backbone
from fedprompt.backbones.vit import READS, ViT
from fedprompt.config import BackboneConfig
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
FAMILIES = {
    "vit": (transformers.ViTConfig, transformers.ViTModel, {"intermediate_size": 48}),
    "vit classifier": (transformers.ViTConfig, transformers.ViTForImageClassification, {"intermediate_size": 48}),
    "vit without qkv bias": (
        transformers.ViTConfig,
        transformers.ViTModel,
        {"intermediate_size": 48, "qkv_bias": False},
    ),
    "deit": (transformers.DeiTConfig, transformers.DeiTModel, {"intermediate_size": 48}),
    "dinov2": (transformers.Dinov2Config, transformers.Dinov2Model, {"mlp_ratio": 2}),
    "dinov2 swiglu": (transformers.Dinov2Config, transformers.Dinov2Model, {"mlp_ratio": 2, "use_swiglu_ffn": True}),
    "registers": (
        transformers.Dinov2WithRegistersConfig,
        transformers.Dinov2WithRegistersModel,
        {"mlp_ratio": 2, "num_register_tokens": 4},
    ),
    "dinov3": (
        transformers.DINOv3ViTConfig,
        transformers.DINOv3ViTModel,
        {"intermediate_size": 48, "num_register_tokens": 4},
    ),
    "dinov3 swiglu": (
        transformers.DINOv3ViTConfig,
        transformers.DINOv3ViTModel,
        {"intermediate_size": 48, "use_gated_mlp": True, "hidden_act": "silu", "key_bias": True},
    ),
}


def random_model(family: str) -> torch.nn.Module:
    """A model whose every parameter matters: the initial ones have zero CLS tokens and nearly uniform attention."""
    config, model_class, settings = FAMILIES[family]
    model = model_class(config(**COMMON, **settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return model


def saved(model: torch.nn.Module, folder: Path, **options: str) -> Path:
    model.save_pretrained(folder, **options)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return folder


def reference(model: torch.nn.Module, images: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    body = getattr(model, "vit", model)
    resize = {} if "dino" in model.config.model_type else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        output = body(images, output_hidden_states=True, **resize)
    return output.last_hidden_state, output.hidden_states


def random_images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def loaded(folder: Path, size: int | None = None) -> ViT:
    return load_backbone(BackboneConfig(name=str(folder), image_size=size), folder)


@pytest.mark.parametrize("size", [16, 8, 28])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_those_of_transformers_at_every_resolution(tmp_path, family, size):
    model = random_model(family)
    vit = loaded(saved(model, tmp_path), size)
    images = random_images(size)
    expected, _ = reference(model, images)
    seen = vit.run(vit.embed(images), reads=("cls", "patches"))
    torch.testing.assert_close(seen["cls"], expected[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen["patches"], expected[:, 1 + vit.shape.extra_tokens :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_block_inputs_equal_the_hidden_states_of_transformers(tmp_path, family):
    model = random_model(family)
    vit = loaded(saved(model, tmp_path))
    _, hidden = reference(model, random_images(16))
    for ours, theirs in zip(vit.block_inputs(vit.embed(random_images(16))), hidden, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_prompts_stand_without_a_place_in_a_dinov3(tmp_path):
    """`transformers` turns the last rows only, those of the patches; so rows may be inserted behind CLS."""
    model = random_model("dinov3").double()
    vit = load_backbone(
        BackboneConfig(name=str(saved(model.float(), tmp_path)), dtype="float64", image_size=28), tmp_path
    )
    images = random_images(28).double()
    blocks = (0, 2)
    tokens = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model.double()
    with torch.no_grad():
        rows, places = model.embeddings(images), model.rope_embeddings(images)
        for block, layer in enumerate(model.model.layer):
            if block in blocks:
                held = 3 * (block > 0)
                fresh = tokens[blocks.index(block)].expand(2, -1, -1)
                rows = torch.cat([rows[:, :1], fresh, rows[:, 1 + held :]], dim=1)
            rows = as_tensor(layer(rows, position_embeddings=places))
        expected = model.norm(rows)
    found = vit.run(vit.embed(images), [TokenPrompt(tokens, blocks)], READS)
    torch.testing.assert_close(found["cls"], expected[:, 0], rtol=0, atol=1e-6)  # its angles are in single precision
    torch.testing.assert_close(found["prompts"], expected[:, 1:4], rtol=0, atol=1e-6)
    torch.testing.assert_close(found["patches"], expected[:, 8:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("family", "extra"), [("vit", 0), ("deit", 1), ("dinov2", 0), ("registers", 4), ("dinov3", 4)])
def test_extra_tokens_stand_between_cls_and_patches(tmp_path, family, extra):
    vit = loaded(saved(random_model(family), tmp_path))
    assert vit.shape.extra_tokens == extra
    assert vit.embed(random_images(16)).shape == (2, 1 + extra + 16, 32)


def test_the_resolution_defaults_to_the_native_one(tmp_path):
    vit = loaded(saved(random_model("dinov2"), tmp_path))
    assert vit.shape.image_size == vit.native_image_size == 16


def test_another_resolution_keeps_the_native_one_on_record(tmp_path):
    vit = loaded(saved(random_model("dinov2"), tmp_path), 28)
    assert (vit.shape.image_size, vit.native_image_size) == (28, 16)


def test_sharded_weights_equal_whole_ones(tmp_path):
    model = random_model("dinov2")
    whole = loaded(saved(model, tmp_path / "whole"))
    shards = saved(model, tmp_path / "shards", max_shard_size="20KB")
    assert not (shards / "model.safetensors").exists()
    assert loaded(shards).digest().split() == [whole.digest()]


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2 swiglu", "registers"])
def test_in_memory_parameter_names_are_understood_too(tmp_path, family):
    model = random_model(family)
    published = loaded(saved(model, tmp_path / "published"))
    folder = saved(model, tmp_path / "memory")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    assert loaded(folder).digest() == published.digest()
