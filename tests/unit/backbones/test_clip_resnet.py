"""CLIP's ResNet equals the network written out with torch's own modules, and refuses what needs blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import run, shared_tensors, throwaway_cache
from torch import Tensor, nn
from unit.backbones.test_dual_encoder import NAMES, clip_tokenizer, random_clip
from unit.backbones.test_open_clip import clip_config, open_clip_tensors, written

from fedprompt.backbones import load_backbone
from fedprompt.backbones.clip_resnet import ClipResNet
from fedprompt.backbones.image_sizes import own_sides
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, ConfigError
from fedprompt.features.compute import named
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

WIDTH, BLOCKS, FEATURES, SIDE = 8, (2, 1, 1, 2), 20, 96  # a map of 3 x 3 places, 256 channels


def convolution(channels: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(channels, inner, 1), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = convolution(inner, inner, 3), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = convolution(inner, 4 * inner, 1), nn.BatchNorm2d(4 * inner)
        self.smaller = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        beside = stride > 1 or channels != 4 * inner
        parts = {"0": convolution(channels, 4 * inner, 1), "1": nn.BatchNorm2d(4 * inner)}
        self.downsample = nn.ModuleDict(parts) if beside else None

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.bn1(self.conv1(x)))
        inside = self.smaller(torch.relu(self.bn2(self.conv2(inside))))
        inside = self.bn3(self.conv3(inside))
        if self.downsample is not None:
            x = self.downsample["1"](self.downsample["0"](self.smaller(x)))
        return torch.relu(inside + x)


class Pool(nn.Module):
    def __init__(self, places: int, width: int, heads: int) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.zeros(places + 1, width))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.c_proj, self.heads = nn.Linear(width, FEATURES), heads

    def forward(self, x: Tensor) -> Tensor:
        """Every row (B, 1 + M, D) as a query; the first is the image's."""
        rows = x.flatten(2).transpose(1, 2)
        rows = torch.cat([rows.mean(1, keepdim=True), rows], dim=1) + self.positional_embedding
        found = []
        query, key, value = (part(rows) for part in (self.q_proj, self.k_proj, self.v_proj))
        for q, k, v in zip(*(part.chunk(self.heads, dim=-1) for part in (query, key, value)), strict=True):
            found.append(torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v)
        return self.c_proj(torch.cat(found, dim=-1))


class Network(nn.Module):
    """Three convolutions in front, four layers of bottlenecks, the attention."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.conv1, self.bn1 = convolution(3, half, 3, stride=2), nn.BatchNorm2d(half)
        self.conv2, self.bn2 = convolution(half, half, 3), nn.BatchNorm2d(half)
        self.conv3, self.bn3 = convolution(half, WIDTH, 3), nn.BatchNorm2d(WIDTH)
        channels = WIDTH
        for layer, count in enumerate(BLOCKS):
            inner, blocks = WIDTH * 2**layer, nn.ModuleList()
            for block in range(count):
                blocks.append(Bottleneck(channels, inner, stride=2 if layer and not block else 1))
                channels = 4 * inner
            setattr(self, f"layer{layer + 1}", blocks)
        self.attnpool = Pool((SIDE // 32) ** 2, channels, heads=channels // 64)

    def forward(self, x: Tensor) -> Tensor:
        for number in (1, 2, 3):
            x = torch.relu(getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x)))
        x = F.avg_pool2d(x, 2)
        for layer in (1, 2, 3, 4):
            for block in getattr(self, f"layer{layer}"):
                x = block(x)
        return self.attnpool(x)


def random_network() -> Network:
    model, generator = Network(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                spread = noise[0].numel() ** -0.5 if tensor.ndim > 1 and "positional" not in name else 0.2
                around_one = tensor.ndim == 1 and name.endswith(("weight", "running_var"))
                tensor.copy_((1 + 0.2 * noise).abs() if around_one else 1.5 * spread * noise)
    return model.eval()


def tensors_of(network: Network) -> dict[str, Tensor]:
    text = {name: tensor for name, tensor in open_clip_tensors(random_clip()).items() if not name.startswith("visual.")}
    return text | {f"visual.{name}": tensor.detach().clone() for name, tensor in network.state_dict().items()}


def config() -> dict[str, Any]:
    vision = {"image_size": SIDE, "layers": list(BLOCKS), "width": WIDTH, "patch_size": None}
    return {**clip_config(random_clip(), "quick_gelu"), "vision_cfg": vision}


@pytest.fixture(scope="module")
def network() -> Network:
    return random_network()


@pytest.fixture(scope="module")
def folder(network, tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("resnet"), tensors_of(network), config())


def loaded(folder: Path, **settings: Any) -> ClipResNet:
    found = load_backbone(BackboneConfig(name=str(folder), **settings), throwaway_cache())
    assert isinstance(found, ClipResNet)
    return found


def images(side: int = SIDE) -> Tensor:
    return torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(1))


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_the_tower_equals_torchs_own_modules(network, folder, dtype, tolerance):
    ours, precision = loaded(folder, dtype=dtype), getattr(torch, dtype)
    with torch.no_grad():
        expected = network.to(precision)(images().to(precision))
        network.float()
    found = ours.run(ours.embed(images()), reads=("image", "image_raw", "image_patches"))
    torch.testing.assert_close(found["image"], unit(expected[:, 0]), rtol=0, atol=tolerance)
    torch.testing.assert_close(found["image_patches"], unit(expected[:, 1:]), rtol=0, atol=tolerance)
    torch.testing.assert_close(found["image_raw"], expected[:, 0], rtol=tolerance, atol=10 * tolerance)
    assert unit(expected[:, 0]).std(0).max() > 0.01  # images differ


def test_its_text_tower_is_clips(folder):
    model = random_clip("quick_gelu")
    sentences = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    tokens = clip_tokenizer()(sentences, padding="max_length", max_length=77, return_tensors="pt")
    with torch.no_grad():
        expected = unit(model.get_text_features(**tokens).pooler_output)
    ours = loaded(folder)
    torch.testing.assert_close(ours.language(NAMES).encode_words("a photo of a"), expected, rtol=0, atol=1e-5)
    assert ours.scale == pytest.approx(37.0)


def test_positions_are_resampled_for_another_resolution(network, folder):
    ours = loaded(folder, image_size=64)
    grid = network.attnpool.positional_embedding[1:].detach().T.reshape(1, -1, 3, 3)
    small = F.interpolate(grid, size=(2, 2), mode="bicubic", align_corners=False).flatten(2)[0].T
    torch.testing.assert_close(ours.weights["position"], small, rtol=0, atol=1e-6)
    assert ours.run(ours.embed(images(64)), reads=("patches",))["patches"].shape == (3, 4, 256)


def test_its_side_is_known_without_its_weights(folder):
    assert own_sides(BackboneConfig(name=str(folder))) == (32, SIDE)


def test_a_digest_tells_it_from_one_with_another_weight(network, folder, tmp_path):
    tensors = tensors_of(network)
    tensors["visual.layer2.0.conv2.weight"][0, 0, 0, 0] += 1
    assert loaded(written(tmp_path, tensors, config())).digest() != loaded(folder).digest() == loaded(folder).digest()


# what is refused


def test_prompts_in_the_image_tower_are_refused(folder):
    ours = loaded(folder)
    prompt = TokenPrompt(torch.zeros(1, 2, 256), (0,))
    with pytest.raises(
        ConfigError, match=r"backbone\.name must be a vision transformer for a method that puts prompts"
    ):
        ours.run(ours.embed(images()), [prompt], reads=("image",))


@pytest.mark.parametrize("needs", ["block_inputs", "block_inputs:2", "cls:1"])
def test_features_of_blocks_are_refused(folder, needs):
    with pytest.raises(ConfigError, match=r"backbone\.name must be a vision transformer"):
        named(loaded(folder), needs)


@pytest.mark.parametrize("method", ["fedvpt", "fedvpt_deep", "pfedbayespt", "pep_fedpt", "sgpt", "fedmaple", "fedlora"])
def test_methods_that_need_blocks_are_refused_before_they_begin(settings, folder, method):
    backbone = {"name": str(folder), "image_size": 64}
    with pytest.raises(
        ConfigError, match=r"backbone\.name must be a vision transformer for a method that puts prompts"
    ):
        run(settings(backbone=backbone, method={"name": method}))


def test_a_method_of_words_alone_runs(settings, folder):
    backbone = {"name": str(folder), "image_size": 64}
    data = {"train_per_cell": 2, "test_per_cell": 1}
    made = run(settings(backbone=backbone, data=data, method={"name": "promptfl"}, federation={"rounds": 1}))
    (context,) = shared_tensors(made).values()
    assert context.shape[1] == 32  # the width of the text tower


def test_a_stem_is_refused(folder):
    with pytest.raises(BackboneError, match=r"backbone\.stem must be 0 for CLIP's ResNet, which has no blocks, got 1"):
        loaded(folder, stem=1)


@pytest.mark.parametrize("name", ["layer3.0.bn2.running_var", "attnpool.c_proj.bias", "conv1.weight"])
def test_a_missing_tensor_is_told(network, tmp_path, name):
    tensors = tensors_of(network)
    del tensors[f"visual.{name}"]
    with pytest.raises(BackboneError, match=f"must be those of a whole CLIP ResNet, got no '{name}'"):
        loaded(written(tmp_path, tensors, config()))


def test_an_unknown_tensor_is_told(network, tmp_path):
    with pytest.raises(BackboneError, match=r"got unknown tensors such as 'fc\.weight'"):
        loaded(written(tmp_path, {**tensors_of(network), "visual.fc.weight": torch.ones(1)}, config()))


def test_an_image_size_that_its_positions_do_not_fit_is_told(network, tmp_path):
    wrong = config()
    wrong["vision_cfg"]["image_size"] = 128
    with pytest.raises(BackboneError, match="image_size must fit the 10 positions of the weights, got 128"):
        loaded(written(tmp_path, tensors_of(network), wrong))
