"""CLIP's ResNet: convolutions, then one attention that pools the map; no blocks, so no prompts and no changed weights.

    x_0 = mean of the map + its position,   x_m = place m of the map + its position
    cls = softmax(q(x_0) k(x)^T / sqrt(d / h)) v(x),   patch m the same with q(x_m)

The projection behind the attention is the image projection. Batch norms are constants of a frozen tower and are folded into the
convolutions in front of them. Channels, blocks and strides follow from the tensors: a bottleneck is three convolutions, and the
first of the layers 2 to 4 halves the map by averages before the third convolution and beside them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.assemble import compute_device
from fedprompt.backbones.catalog import Triple
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.position_embedding import chosen_size, interpolate
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.shape import CHANNELS, ViTShape
from fedprompt.backbones.vit import READS, ViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, ConfigError, ContractError, broken
from fedprompt.modules.insertion import WITHOUT_BLOCKS, TokenPrompt, spread
from fedprompt.tensors import to_device

BATCH_NORM_EPS = 1e-5
REDUCTION = 32  # pixels along a side of one place of the map


@dataclass(frozen=True, eq=False)
class ResNetTower(ViT):
    """The image tower. What is read is what a `ViT` has, `cls` and `patches`, in front of the projection."""

    def embed(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, S, S) to the rows (B, T, d) that the attention reads: their mean, then all places."""
        size = self.shape.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (CHANNELS, size, size):
            raise ContractError(f"images must be (B, {CHANNELS}, {size}, {size}), got {tuple(images.shape)}")
        with layers.precision(self.autocast, self.device):
            rows = self._map(to_device(images, self.device, self.dtype)).flatten(2).transpose(1, 2).to(self.dtype)
        mean = rows.mean(1, keepdim=True) + self.weights["lead"]
        return torch.cat([mean, rows + self.weights["position"]], dim=1)

    def run(
        self,
        tokens: Tensor,
        prompts: Sequence[TokenPrompt] = (),
        reads: Iterable[str] = ("cls",),
        start: int = 0,
        pause: tuple[int, Callable[[Tensor], Sequence[TokenPrompt]]] | None = None,
        repeat: int = 1,
    ) -> dict[str, Tensor]:
        """The attention with the mean, or with every place, as the query."""
        if prompts or pause is not None or start:
            raise ConfigError(WITHOUT_BLOCKS)
        wanted = frozenset(reads)
        if not wanted or not wanted <= set(READS):
            raise ContractError(f"reads must be some of {', '.join(READS)}, got {sorted(wanted)}")
        asking = {"cls": tokens[:, :1], "patches": tokens[:, 1:], "prompts": tokens[:, :0]}
        seen = {name: spread(self._attended(asking[name], tokens), len(tokens) * repeat) for name in wanted}
        return seen | {"cls": seen["cls"].squeeze(1)} if "cls" in seen else seen

    def block_inputs(self, tokens: Tensor, blocks: Sequence[int] | None = None) -> list[Tensor]:
        raise ConfigError(WITHOUT_BLOCKS)

    def read_early(self, tokens: Tensor, blocks: int) -> Tensor:
        raise ConfigError(WITHOUT_BLOCKS)

    def _attended(self, queries: Tensor, rows: Tensor) -> Tensor:
        weight, bias = self.weights["attention.in.weight"], self.weights["attention.in.bias"]
        width, heads = self.shape.width, self.shape.heads
        with layers.precision(self.autocast, self.device):
            query = F.linear(queries, weight[:width], bias[:width]).unflatten(-1, (heads, -1)).transpose(1, 2)
            key, value = layers.split_heads(F.linear(rows, weight[width:], bias[width:]), heads, 2)
            return layers.attention(query, key, value).transpose(1, 2).flatten(2).to(rows.dtype)

    def _map(self, x: Tensor) -> Tensor:
        """The map (B, d, S / 32, S / 32) of an image."""
        for number in (1, 2, 3):
            x = F.relu(self._convolved(x, f"conv{number}", stride=2 if number == 1 else 1))
        x = F.avg_pool2d(x, 2)
        for layer in (1, 2, 3, 4):
            block = 0
            while f"layer{layer}.{block}.conv1.weight" in self.weights:
                x = self._bottleneck(x, f"layer{layer}.{block}.", halved=layer > 1 and block == 0)
                block += 1
        return x

    def _bottleneck(self, x: Tensor, prefix: str, halved: bool) -> Tensor:
        inside = F.relu(self._convolved(x, prefix + "conv1"))
        inside = F.relu(self._convolved(inside, prefix + "conv2"))
        if halved:
            x, inside = F.avg_pool2d(x, 2), F.avg_pool2d(inside, 2)
        if prefix + "downsample.weight" in self.weights:
            x = self._convolved(x, prefix + "downsample")
        return F.relu(x + self._convolved(inside, prefix + "conv3"))

    def _convolved(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = self.weights[name + ".weight"]
        return F.conv2d(x, weight, self.weights[name + ".bias"], stride=stride, padding=weight.shape[-1] // 2)


@dataclass(frozen=True, eq=False, kw_only=True)
class ClipResNet(DualEncoder, ResNetTower):
    """The tower with its text tower: `DualEncoder` reads the tower as it reads any other."""


_CONVOLUTION = re.compile(r"((?:layer[1-4]\.\d+\.)?)(?:conv([123])|downsample\.0)\.weight")
_POOL = "attnpool."


def resnet_tower(
    tensors: dict[str, Tensor], native: int, head_width: int, own: tuple[Triple, Triple], settings: BackboneConfig
) -> tuple[ResNetTower, Projection]:
    """The tower of the `visual.` tensors of an open_clip file (without that prefix), and its projection."""
    if settings.stem:
        raise BackboneError(broken("backbone.stem", "be 0 for CLIP's ResNet, which has no blocks", settings.stem))
    working = torch.float64 if settings.dtype == "float64" else torch.float32
    left = {name: tensor.to(working) for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
    try:
        weights = _convolutions(left)
        into = {f"linear.{part}": left.pop(f"{_POOL}c_proj.{part}") for part in ("weight", "bias")}
        positions = left.pop(f"{_POOL}positional_embedding")
        for part in ("weight", "bias"):
            parts = [left.pop(f"{_POOL}{name}_proj.{part}") for name in "qkv"]
            weights[f"attention.in.{part}"] = torch.cat(parts)
    except KeyError as error:
        raise BackboneError(f"the weights must be those of a whole CLIP ResNet, got no {error.args[0]!r}") from error
    if left:
        raise BackboneError(
            f"the weights must be those of a CLIP ResNet, got unknown tensors such as {next(iter(left))!r}"
        )
    size = chosen_size(settings.image_size, native, REDUCTION)
    shape = ViTShape(positions.shape[1], 0, positions.shape[1] // head_width, 0, patch=REDUCTION, image_size=native)
    if len(positions) != shape.tokens:
        raise BackboneError(broken("image_size", f"fit the {len(positions)} positions of the weights", native))
    shape = dataclasses.replace(shape, image_size=size)
    weights["lead"], weights["position"] = positions[:1], interpolate(positions[1:], shape.grid, antialias=False)
    device, dtype = compute_device(settings.device), getattr(torch, settings.dtype)
    placed = {name: tensor.detach().to(device, dtype).contiguous() for name, tensor in weights.items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in placed.values()):
        raise BackboneError("the weights must be finite, got infinite values or not-a-number: the file is damaged")
    tower = ResNetTower(settings.name, shape, *own, placed, native_image_size=native)
    return tower, Projection({name: tensor.detach().to(device, dtype) for name, tensor in into.items()})


def _convolutions(left: dict[str, Tensor]) -> dict[str, Tensor]:
    """All convolutions with the norm behind each folded in; they are taken out of the tensors."""
    found = {}
    for name in [name for name in left if _CONVOLUTION.fullmatch(name)]:
        match = _CONVOLUTION.fullmatch(name)
        assert match is not None
        prefix, number = match.groups()
        after = f"{prefix}bn{number}." if number else f"{prefix}downsample.1."
        norm = {part: left.pop(after + part) for part in ("weight", "bias", "running_mean", "running_var")}
        factor = norm["weight"] / (norm["running_var"] + BATCH_NORM_EPS).sqrt()
        ours = prefix + (f"conv{number}" if number else "downsample")
        found[f"{ours}.weight"] = left.pop(name) * factor[:, None, None, None]
        found[f"{ours}.bias"] = norm["bias"] - norm["running_mean"] * factor
    if "conv1.weight" not in found:
        raise KeyError("conv1.weight")
    return found
