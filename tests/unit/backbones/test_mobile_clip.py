"""MobileCLIP's towers equal those of timm 1.0.31 and open_clip's text encoder without a mask, and are refused where they lack blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import run, shared_tensors, throwaway_cache
from torch import Tensor
from unit.backbones.test_dual_encoder import NAMES, clip_tokenizer, random_clip
from unit.backbones.test_open_clip import clip_config, open_clip_tensors, written

from fedprompt.backbones import load_backbone
from fedprompt.backbones.image_sizes import own_sides
from fedprompt.backbones.mobile_clip import MobileClipMCi, MobileClipViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, ConfigError

pytestmark = pytest.mark.unit

LAYERS, DIMS = (1, 2, 1, 2), (8, 16, 16, 32)
FEATURES, SIDE, VIT_SIDE = 20, 96, 64
# Made once by timm 1.0.31 in double precision, with weights and images as below: the first four features of two images
OF_MCI = (
    (-14.769634939669514, -9.568725459020898, 12.04744605958092, 12.2112107719648),
    (-29.971267712341117, -0.23545495186706544, 29.44764394389239, 6.976767998856677),
)
OF_VIT = (
    (-5.115357680718627, 0.8141599110915188, 3.834107510130851, -3.7584322995638204),
    (-5.114825407051541, 0.8110688562484023, 3.8357192391961234, -3.756459164312561),
)

Shapes = dict[str, tuple[int, ...]]


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}


def convolution(name: str, out: int, inner: int, size: int) -> Shapes:
    return {f"{name}.conv.weight": (out, inner, size, size), **norm(f"{name}.bn", out)}


def whole(name: str, *size: int) -> Shapes:
    return {f"{name}.weight": size, f"{name}.bias": size[:1]}


def mci_shapes() -> Shapes:
    """The tensors of timm's FastViT with these layers and widths, before its branches are joined."""
    first, last = DIMS[0], DIMS[-1]
    found: Shapes = {}
    for number, inner, size in ((0, 3, 3), (1, 1, 3)):
        found |= convolution(f"stem.{number}.conv_kxk.0", first, inner, size)
        found |= convolution(f"stem.{number}.conv_scale", first, inner, 1)
    found |= norm("stem.2.identity", first) | convolution("stem.2.conv_kxk.0", first, first, 1)
    for stage, (count, width) in enumerate(zip(LAYERS, DIMS, strict=True)):
        name = f"stages.{stage}."
        if stage:
            down, inner = f"{name}downsample.proj.", 1
            found |= convolution(f"{down}0.large_conv", width, inner, 7) | convolution(
                f"{down}0.small_conv", width, inner, 3
            )
            found |= norm(f"{down}1.identity", width) | convolution(f"{down}1.conv_kxk.0", width, width, 1)
        if stage > 1:
            found |= whole(f"{name}downsample.proj.0.se.fc1", 8, width, 1, 1)
            found |= whole(f"{name}downsample.proj.0.se.fc2", width, 8, 1, 1)
        if stage == 3:
            found |= whole(f"{name}pos_emb.pos_enc", width, 1, 7, 7)
        for block in range(count):
            found |= mci_block(f"{name}blocks.{block}.", width, attention=stage == 3)
    found |= convolution("final_conv.conv_kxk.0", 2 * last, 1, 3) | convolution("final_conv.conv_scale", 2 * last, 1, 1)
    found |= whole("final_conv.se.fc1", 2 * last // 16, 2 * last, 1, 1)
    found |= whole("final_conv.se.fc2", 2 * last, 2 * last // 16, 1, 1)
    return found | whole("head.fc", FEATURES, 2 * last)


def mci_block(name: str, width: int, attention: bool) -> Shapes:
    found = convolution(f"{name}mlp.conv", width, 1, 7)
    found |= whole(f"{name}mlp.fc1", 3 * width, width, 1, 1) | whole(f"{name}mlp.fc2", width, 3 * width, 1, 1)
    mixer = f"{name}token_mixer."
    if attention:
        found |= norm(f"{name}norm", width) | {f"{mixer}qkv.weight": (3 * width, width)}
        found |= whole(f"{mixer}proj", width, width)
        return found | {f"{name}layer_scale_{number}.gamma": (width, 1, 1) for number in (1, 2)}
    found |= norm(f"{mixer}norm.identity", width) | norm(f"{mixer}mixer.identity", width)
    found |= convolution(f"{mixer}mixer.conv_kxk.0", width, 1, 3) | convolution(f"{mixer}mixer.conv_scale", width, 1, 1)
    return found | {f"{mixer}layer_scale.gamma": (width, 1, 1), f"{name}layer_scale.gamma": (width, 1, 1)}


def vit_shapes() -> Shapes:
    """timm's `vit_base_mci` with two blocks of width 192."""
    found: Shapes = {"cls_token": (1, 1, 192), "pos_embed": (1, 16, 192)}
    found |= convolution("patch_embed.backbone.0", 48, 3, 4) | convolution("patch_embed.backbone.1", 48, 48, 2)
    found |= whole("patch_embed.backbone.2.conv", 192, 48, 2, 2)
    for block in range(2):
        name = f"blocks.{block}."
        found |= whole(f"{name}norm1", 192) | whole(f"{name}attn.qkv", 576, 192) | whole(f"{name}attn.proj", 192, 192)
        found |= whole(f"{name}norm2", 192) | whole(f"{name}mlp.fc1", 768, 192) | whole(f"{name}mlp.fc2", 192, 768)
    return found | whole("norm", 192) | whole("head", FEATURES, 192)


def filled(shapes: Shapes) -> dict[str, Tensor]:
    """Every tensor by a formula of its name, so that timm could be given the same."""
    found = {}
    for name, size in shapes.items():
        steps = torch.arange(math.prod(size), dtype=torch.float64)
        wave = torch.sin(steps * 0.37 + sum(name.encode()) % 97).reshape(size)
        if name.endswith("running_var"):
            wave = 1 + 0.5 * wave
        elif len(size) == 1 and name.endswith("weight"):
            wave = 1 + 0.3 * wave
        elif len(size) > 1 and not name.endswith(("gamma", "pos_embed", "cls_token")):
            wave = wave * (2 / math.prod(size[1:])) ** 0.5
        else:
            wave = 0.5 * wave
        found[name] = wave
    return found


def images(side: int) -> Tensor:
    steps = torch.arange(2 * 3 * side * side, dtype=torch.float64)
    return (torch.sin(steps * 0.11) * torch.cos(steps * 0.0013)).reshape(2, 3, side, side)


def config(name: str, side: int, pool: str, unmasked: bool = False) -> dict[str, Any]:
    vision = {"timm_model_name": name, "timm_model_pretrained": False, "timm_pool": pool, "timm_proj": None}
    vision |= {"timm_drop": 0.0, "timm_drop_path": 0.0, "image_size": side}
    made = {**clip_config(random_clip()), "vision_cfg": vision, "custom_text": True}
    return {**made, "text_cfg": {**made["text_cfg"], "no_causal_mask": unmasked}}


def folder_of(path: Path, trunk: dict[str, Tensor], made: dict[str, Any]) -> Path:
    text = {
        f"text.{name}": each
        for name, each in open_clip_tensors(random_clip()).items()
        if not name.startswith("visual.")
    }
    text["logit_scale"] = text.pop("text.logit_scale")
    return written(path, text | {f"visual.trunk.{name}": each for name, each in trunk.items()}, made)


@pytest.fixture(scope="module")
def mci(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = config("fastvit_mci1", SIDE, "avg", unmasked=True)
    return folder_of(tmp_path_factory.mktemp("mci"), filled(mci_shapes()), made)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = config("vit_base_mci_224", VIT_SIDE, "token")
    return folder_of(tmp_path_factory.mktemp("vit"), filled(vit_shapes()), made)


def loaded(folder: Path, **settings: Any) -> Any:
    return load_backbone(BackboneConfig(name=str(folder), **settings), throwaway_cache())


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_both_image_towers_equal_timms(mci: Path, vit: Path, dtype: str, tolerance: float) -> None:
    for folder, kind, side, golden in ((mci, MobileClipMCi, SIDE, OF_MCI), (vit, MobileClipViT, VIT_SIDE, OF_VIT)):
        ours = loaded(folder, dtype=dtype)
        assert type(ours) is kind
        found = ours.run(ours.embed(images(side)), reads=("image", "image_raw"))
        expected = torch.tensor(golden, dtype=torch.float64)
        torch.testing.assert_close(found["image_raw"][:, :4].double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found["image"], unit(found["image_raw"]), rtol=0, atol=1e-6)


def test_branches_that_were_joined_before_are_the_same_tower(mci: Path, tmp_path: Path) -> None:
    """As timm stores a tower after `reparameterize`: one convolution where there were branches."""
    ours, trunk = loaded(mci, dtype="float64"), filled(mci_shapes())
    joined = {name: each for name, each in trunk.items() if ".se." in name or name.startswith("head")}
    joined |= {name: trunk[name] for name in trunk if "mlp." in name or "qkv" in name or "proj.weight" in name}
    joined |= {name: each for name, each in trunk.items() if name.startswith("stages.3.blocks")}
    joined |= {name: each for name, each in trunk.items() if name.endswith("layer_scale.gamma") and "mixer" not in name}
    places = {f"stem.{number}": f"stem.{number}" for number in range(3)} | {"final": "final_conv"}
    for stage, count in enumerate(LAYERS):
        name = f"stages.{stage}."
        if stage:
            places |= {f"{name}down": f"{name}downsample.proj.0", f"{name}point": f"{name}downsample.proj.1"}
        if stage < 3:
            places |= {f"{name}{block}.mix": f"{name}blocks.{block}.token_mixer" for block in range(count)}
    places["stages.3.position"] = "stages.3.pos_emb"
    for mine, theirs in places.items():
        for part in ("weight", "bias"):
            joined[f"{theirs}.reparam_conv.{part}"] = ours.weights[f"{mine}.{part}"]
    joined = {name: each.clone() for name, each in joined.items() if "downsample.proj.0.small" not in name}
    again = loaded(folder_of(tmp_path, joined, config("fastvit_mci1", SIDE, "avg", unmasked=True)), dtype="float64")
    assert again.weights.keys() == ours.weights.keys()
    for name, tensor in ours.weights.items():
        torch.testing.assert_close(again.weights[name], tensor, rtol=0, atol=1e-12)


def test_the_text_tower_without_a_mask_equals_torchs_own_attention(mci: Path) -> None:
    """All 77 positions attend to each other, padding among them; the row of the end token is read."""
    tensors = {name: each.double() for name, each in open_clip_tensors(random_clip()).items()}
    sentences = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    tokens = clip_tokenizer()(sentences, padding="max_length", max_length=77, return_tensors="pt")["input_ids"]
    ours = loaded(mci, dtype="float64")
    ends = (tokens == ours.text.end).int().argmax(1)
    for row, end in enumerate(ends.tolist()):
        tokens[row, end + 1 :] = 0
    x = tensors["token_embedding.weight"][tokens] + tensors["positional_embedding"]
    for block in range(3):
        name = f"transformer.resblocks.{block}."
        torso = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
        torso.in_proj_weight.data, torso.in_proj_bias.data = (
            tensors[f"{name}attn.in_proj_{part}"] for part in ("weight", "bias")
        )
        torso.out_proj.weight.data, torso.out_proj.bias.data = (
            tensors[f"{name}attn.out_proj.{part}"] for part in ("weight", "bias")
        )
        rows = F.layer_norm(x, (32,), tensors[f"{name}ln_1.weight"], tensors[f"{name}ln_1.bias"])
        x = x + torso(rows, rows, rows, need_weights=False)[0]
        rows = F.layer_norm(x, (32,), tensors[f"{name}ln_2.weight"], tensors[f"{name}ln_2.bias"])
        inside = F.gelu(F.linear(rows, tensors[f"{name}mlp.c_fc.weight"], tensors[f"{name}mlp.c_fc.bias"]))
        x = x + F.linear(inside, tensors[f"{name}mlp.c_proj.weight"], tensors[f"{name}mlp.c_proj.bias"])
    read = F.layer_norm(x[torch.arange(len(x)), ends], (32,), tensors["ln_final.weight"], tensors["ln_final.bias"])
    expected = unit(read @ tensors["text_projection"]).detach()
    found = ours.language(NAMES).encode_words("a photo of a")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    masked = loaded(
        folder_of(mci.parent / "masked", filled(mci_shapes()), config("fastvit_mci1", SIDE, "avg")), dtype="float64"
    )
    assert float((masked.language(NAMES).encode_words("a photo of a") - expected).abs().max()) > 1e-3


def test_contexts_of_several_clients_and_per_class_run_without_a_mask(mci: Path) -> None:
    ours = loaded(mci, dtype="float64")
    language, generator = ours.language(NAMES), torch.Generator().manual_seed(2)
    contexts = torch.randn(3, 4, 32, generator=generator, dtype=torch.float64)
    together = language.encode(contexts, "end")
    for number, context in enumerate(contexts):
        torch.testing.assert_close(together[number], language.encode(context.unsqueeze(0), "end")[0])
    each = contexts.unsqueeze(1).expand(-1, len(NAMES), -1, -1)
    torch.testing.assert_close(language.encode(each, "end"), together)


def test_a_word_method_trains_on_the_convolutions_and_prompts_enter_the_vit(
    settings: Any, mci: Path, vit: Path
) -> None:
    small = {"backbone": {"name": str(mci), "image_size": 32}, "federation": {"rounds": 1}}
    done = run(settings(name="words", method={"name": "promptfl"}, **small))
    assert "context" in shared_tensors(done)
    with pytest.raises(ConfigError, match=r"backbone\.name must be a vision transformer"):
        run(settings(name="prompts", method={"name": "fedmaple"}, **small))
    prompted = {"name": "fedmaple", "coupling": "independent", "vision_depth": 1}
    done = run(
        settings(name="vit", method=prompted, backbone={"name": str(vit), "image_size": 32}, federation={"rounds": 1})
    )
    assert "vision" in shared_tensors(done)


def test_sides_are_known_without_weights(mci: Path, vit: Path) -> None:
    assert own_sides(BackboneConfig(name=str(mci))) == (32, SIDE)
    assert own_sides(BackboneConfig(name=str(vit))) == (16, VIT_SIDE)


@pytest.mark.parametrize(
    ("name", "pool", "change", "complaint"),
    [
        ("fastvit_mci3", "avg", {}, "timm_model_name in open_clip_config.json must be one of"),
        ("fastvit_mci1", "token", {}, "timm_pool in open_clip_config.json must be one of 'avg', got 'token'"),
        (
            "fastvit_mci1",
            "avg",
            {"stages.0.blocks.0.mlp.fc1.weight": None},
            "got no 'stages.0.blocks.0.mlp.fc1.weight'",
        ),
        ("fastvit_mci1", "avg", {"extra.weight": torch.zeros(1)}, "got unknown tensors such as 'extra.weight'"),
        ("fastvit_mci1", "avg", {"head.fc.bias": torch.full((FEATURES,), torch.nan)}, "must be finite"),
    ],
)
def test_folders_of_another_kind_are_refused(
    tmp_path: Path, name: str, pool: str, change: dict[str, Any], complaint: str
) -> None:
    trunk = {key: each for key, each in {**filled(mci_shapes()), **change}.items() if each is not None}
    with pytest.raises(BackboneError, match=complaint):
        loaded(folder_of(tmp_path, trunk, config(name, SIDE, pool)))


def test_a_stem_is_refused_without_blocks(mci: Path) -> None:
    with pytest.raises(BackboneError, match=r"backbone\.stem must be 0 for MobileCLIP's MCi"):
        loaded(mci, stem=1)
