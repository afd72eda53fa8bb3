"""MobileCLIP's image towers (Vasu et al., CVPR 2024, arXiv 2311.17049), in the layout of open_clip: timm's `fastvit_mci*` and
`vit_base_mci_*`.

MCi, a FastViT, has convolutions and no blocks that prompts could enter: a stem, four stages of blocks that mix places by
convolutions (the last stage by attention), one more convolution, and the mean over the map in front of the projection. What is
read as CLS is that mean, `patches` are the places of the map. It is used like CLIP's ResNet.

MobileCLIP-B is a vision transformer whose patches are embedded by three convolutions; prompts enter its blocks.

Published weights have several branches for one convolution, each with its batch norm. In a frozen tower their sum is one
convolution: kernels are padded to one size, norms folded in, and what leaves a value as it is becomes a kernel with a 1 in
its middle. Factors behind a block (LayerScale) are folded into its last map.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.assemble import Triple, assemble, compute_device, infer_shape
from fedprompt.backbones.clip_resnet import BATCH_NORM_EPS, ResNetTower
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.key_mapping import canonical
from fedprompt.backbones.position_embedding import chosen_size
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.shape import CHANNELS, ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken
from fedprompt.tensors import Tensors

HEAD = 32  # width of an attention head of the last stage
REDUCTION = 32  # pixels along a side of one place of the map
STAGES = 4
WHOLE = ("weight", "bias")


@dataclass(frozen=True, eq=False)
class MCiTower(ResNetTower):
    """A map of convolutions, read as its mean and its places."""

    def _attended(self, queries: Tensor, rows: Tensor) -> Tensor:
        return queries

    def _map(self, x: Tensor) -> Tensor:
        for number, stride in enumerate((2, 2, 1)):
            x = F.gelu(self._one(x, f"stem.{number}", stride))
        for stage in range(STAGES):
            x = self._stage(x, f"stages.{stage}.")
        return F.gelu(self._gated(self._one(x, "final"), "final."))

    def _stage(self, x: Tensor, prefix: str) -> Tensor:
        if prefix + "down.weight" in self.weights:
            x = F.gelu(self._gated(self._one(x, prefix + "down", 2), prefix + "down."))
            x = F.gelu(self._one(x, prefix + "point"))
        if prefix + "position.weight" in self.weights:
            x = self._one(x, prefix + "position")
        block = 0
        while f"{prefix}{block}.mlp.conv.weight" in self.weights:
            name = f"{prefix}{block}."
            mixes = name + "mix.weight" in self.weights
            x = self._one(x, name + "mix") if mixes else x + self._attention(x, name)
            inside = F.gelu(self._one(self._one(x, name + "mlp.conv"), name + "mlp.in"))
            x = x + self._one(inside, name + "mlp.out")
            block += 1
        return x

    def _attention(self, x: Tensor, name: str) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        projected = layers.linear(self.weights, name + "attention.in", rows)
        query, key, value = layers.split_heads(projected, rows.shape[-1] // HEAD, 3)
        mixed = layers.attention(query, key, value).transpose(1, 2).flatten(2)
        return layers.linear(self.weights, name + "attention.out", mixed).transpose(1, 2).unflatten(2, x.shape[2:])

    def _gated(self, x: Tensor, prefix: str) -> Tensor:
        """Squeeze and excitation, where there is one."""
        if prefix + "squeeze.weight" not in self.weights:
            return x
        inside = F.relu(self._one(x.mean((2, 3), keepdim=True), prefix + "squeeze"))
        return x * self._one(inside, prefix + "excite").sigmoid()

    def _one(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = self.weights[name + ".weight"]
        groups, padding = x.shape[1] // weight.shape[1], weight.shape[-1] // 2
        return F.conv2d(x, weight, self.weights[name + ".bias"], stride, padding, groups=groups)


@dataclass(frozen=True, eq=False, kw_only=True)
class MobileClipMCi(DualEncoder, MCiTower):
    """The tower with its text tower."""


@dataclass(frozen=True, eq=False)
class StemmedViT(ViT):
    """A vision transformer whose patches are embedded by three convolutions that do not overlap."""

    @property
    def frame(self) -> int:
        """Such an embedding is not linear, so nothing can be added to pixels afterwards."""
        return 0

    def _patched(self, images: Tensor) -> Tensor:
        for number in range(3):
            weight, bias = (self.weights[f"stem.{number}.{part}"] for part in WHOLE)
            images = F.conv2d(images, weight, bias, stride=weight.shape[-1])
            images = F.gelu(images) if number < 2 else images
        return images


@dataclass(frozen=True, eq=False, kw_only=True)
class MobileClipViT(DualEncoder, StemmedViT):
    """MobileCLIP-B with its text tower."""


def mci_tower(
    tensors: Tensors, native: int, own: tuple[Triple, Triple], settings: BackboneConfig
) -> tuple[MCiTower, Projection]:
    """The MCi tower of timm's tensors and its projection. How many blocks a stage has follows from them."""
    if settings.stem:
        raise BackboneError(broken("backbone.stem", "be 0 for MobileCLIP's MCi, which has no blocks", settings.stem))
    left = _precise(tensors, settings)
    weights: Tensors = {}
    try:
        for number in range(3):
            weights |= _named(f"stem.{number}", _branches(left, f"stem.{number}."))
        for stage in range(STAGES):
            weights |= _stage(left, f"stages.{stage}.")
        weights |= _named("final", _branches(left, "final_conv.")) | _gate(left, "final_conv.se.", "final.")
        into = {f"linear.{part}": left.pop(f"head.fc.{part}") for part in ("weight", "bias")}
    except KeyError as error:
        raise BackboneError(f"the weights must be those of a whole MobileCLIP, got no {error.args[0]!r}") from error
    _all_used(left)
    width = len(weights["final.bias"])
    size = chosen_size(settings.image_size, native, REDUCTION)
    shape = ViTShape(width, 0, 1, 0, patch=REDUCTION, image_size=size)
    weights["lead"], weights["position"] = torch.zeros(1, width), torch.zeros(shape.patches, width)
    tower = MCiTower(settings.name, shape, *own, _placed(weights, settings), native_image_size=native)
    return tower, Projection(_placed(into, settings))


def stemmed_vit(
    tensors: Tensors, own: tuple[Triple, Triple], settings: BackboneConfig
) -> tuple[StemmedViT, Projection]:
    """The image tower of MobileCLIP-B of timm's tensors, and its projection."""
    left = _precise(tensors, settings)
    try:
        stem: Tensors = {}
        for number in range(3):
            prefix = f"patch_embed.backbone.{number}."
            found = _folded(left, prefix) if number < 2 else tuple(left.pop(f"{prefix}conv.{p}") for p in WHOLE)
            stem |= _named(f"stem.{number}", found)
        into = {f"linear.{part}": left.pop(f"head.{part}") for part in WHOLE}
    except KeyError as error:
        raise BackboneError(f"the weights must be those of a whole MobileCLIP, got no {error.args[0]!r}") from error
    patch = math.prod(int(stem[f"stem.{number}.weight"].shape[-1]) for number in range(3))
    width = len(stem["stem.2.bias"])
    stand_in = {"patch.weight": torch.zeros(width, CHANNELS, patch, patch), "patch.bias": torch.zeros(width)}
    named = canonical(left) | stand_in
    vision = assemble(named, infer_shape(named, 1e-6), *own, settings)
    weights = {name: tensor for name, tensor in vision.weights.items() if name not in stand_in}
    fields = {field.name: getattr(vision, field.name) for field in dataclasses.fields(vision)}
    return StemmedViT(**{**fields, "weights": weights | _placed(stem, settings)}), Projection(_placed(into, settings))


Convolution = tuple[Tensor, ...]  # weight (out, in / groups, k, k) and bias (out,)


def _precise(tensors: Tensors, settings: BackboneConfig) -> Tensors:
    working = torch.float64 if settings.dtype == "float64" else torch.float32
    return {name: tensor.to(working) for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}


def _named(name: str, convolution: Convolution) -> Tensors:
    return dict(zip((f"{name}.weight", f"{name}.bias"), convolution, strict=True))


def _norm(left: Tensors, prefix: str) -> tuple[Tensor, Tensor]:
    """A batch norm with its running figures: y = factor * x + shift."""
    weight, bias, mean, variance = (left.pop(prefix + part) for part in (*WHOLE, "running_mean", "running_var"))
    factor = weight / (variance + BATCH_NORM_EPS).sqrt()
    return factor, bias - mean * factor


def _folded(left: Tensors, prefix: str) -> Convolution:
    """A convolution without a bias and the norm behind it."""
    weight = left.pop(prefix + "conv.weight")
    factor, shift = _norm(left, prefix + "bn.")
    return weight * factor[:, None, None, None], shift


def _sum(parts: list[Convolution]) -> Convolution:
    """Convolutions beside each other as one; smaller kernels are padded."""
    size = max(int(weight.shape[-1]) for weight, _ in parts)
    padded = [F.pad(weight, [(size - weight.shape[-1]) // 2] * 4) for weight, _ in parts]
    return torch.stack(padded).sum(0), torch.stack([bias for _, bias in parts]).sum(0)


def _identity(channels: int, groups_of: int, factor: Tensor) -> Tensor:
    """A kernel (channels, groups_of, 1, 1) that multiplies every channel by its factor."""
    kernel = torch.zeros(channels, groups_of, 1, 1, dtype=factor.dtype)
    kernel[torch.arange(channels), torch.arange(channels) % groups_of] = factor[:, None, None]
    return kernel


def _branches(left: Tensors, prefix: str) -> Convolution:
    """A MobileOne block: convolutions, one of a single pixel, and the input itself, each with a norm; or all of it in one."""
    if prefix + "reparam_conv.weight" in left:
        return tuple(left.pop(f"{prefix}reparam_conv.{part}") for part in WHOLE)
    kinds = sorted({name[len(prefix) :].rpartition(".conv.")[0] for name in left if name.startswith(prefix + "conv_")})
    parts = [_folded(left, f"{prefix}{kind}.") for kind in kinds if kind]
    if prefix + "identity.weight" in left:
        factor, shift = _norm(left, prefix + "identity.")
        groups_of = parts[0][0].shape[1] if parts else 1
        parts.append((_identity(len(shift), groups_of, factor), shift))
    if not parts:
        raise KeyError(prefix + "reparam_conv.weight")
    return _sum(parts)


def _stage(left: Tensors, prefix: str) -> Tensors:
    found: Tensors = {}
    down = prefix + "downsample.proj."
    if any(name.startswith(down) for name in left):
        if down + "0.reparam_conv.weight" in left:
            large = tuple(left.pop(f"{down}0.reparam_conv.{part}") for part in WHOLE)
        else:
            large = _sum([_folded(left, f"{down}0.{size}_conv.") for size in ("large", "small")])
        found |= _named(prefix + "down", large) | _gate(left, down + "0.se.", prefix + "down.")
        found |= _named(prefix + "point", _branches(left, down + "1."))
    position = prefix + "pos_emb."
    if position + "reparam_conv.weight" in left:
        found |= _named(prefix + "position", tuple(left.pop(f"{position}reparam_conv.{part}") for part in WHOLE))
    elif position + "pos_enc.weight" in left:
        kernel, bias = (left.pop(f"{position}pos_enc.{part}") for part in WHOLE)
        found |= _named(prefix + "position", _sum([(kernel, bias), _as_it_is(bias)]))
    block = 0
    while f"{prefix}blocks.{block}.mlp.fc1.weight" in left:
        found |= _block(left, f"{prefix}blocks.{block}.", f"{prefix}{block}.")
        block += 1
    if not block:
        raise KeyError(f"{prefix}blocks.0.mlp.fc1.weight")
    return found


def _as_it_is(bias: Tensor) -> Convolution:
    return _identity(len(bias), 1, torch.ones_like(bias)), torch.zeros_like(bias)


def _block(left: Tensors, prefix: str, name: str) -> Tensors:
    found = _named(name + "mlp.conv", _folded(left, prefix + "mlp.conv."))
    found |= {f"{name}mlp.in.{part}": left.pop(f"{prefix}mlp.fc1.{part}") for part in WHOLE}
    mixer = prefix + "token_mixer."
    if mixer + "qkv.weight" in left:
        factor, shift = _norm(left, prefix + "norm.")
        weight = left.pop(mixer + "qkv.weight")
        bias = left.pop(mixer + "qkv.bias", torch.zeros(len(weight), dtype=weight.dtype))
        found |= {f"{name}attention.in.weight": weight * factor, f"{name}attention.in.bias": bias + weight @ shift}
        scale = left.pop(prefix + "layer_scale_1.gamma").flatten()
        found[f"{name}attention.out.weight"] = left.pop(mixer + "proj.weight") * scale[:, None]
        found[f"{name}attention.out.bias"] = left.pop(mixer + "proj.bias") * scale
        outer = left.pop(prefix + "layer_scale_2.gamma").flatten()
    else:
        found |= _named(name + "mix", _mixer(left, mixer))
        outer = left.pop(prefix + "layer_scale.gamma").flatten()
    found[f"{name}mlp.out.weight"] = left.pop(prefix + "mlp.fc2.weight") * outer[:, None, None, None]
    found[f"{name}mlp.out.bias"] = left.pop(prefix + "mlp.fc2.bias") * outer
    return found


def _mixer(left: Tensors, prefix: str) -> Convolution:
    """x + gamma * (mixer(x) - norm(x)) as one convolution."""
    if prefix + "reparam_conv.weight" in left:
        return tuple(left.pop(f"{prefix}reparam_conv.{part}") for part in WHOLE)
    gamma = left.pop(prefix + "layer_scale.gamma").flatten()
    mixed, plain = _branches(left, prefix + "mixer."), _branches(left, prefix + "norm.")
    parts = [(weight * sign * gamma[:, None, None, None], bias * sign * gamma)
             for sign, (weight, bias) in ((1, mixed), (-1, plain))]  # fmt: skip
    return _sum([*parts, _as_it_is(gamma)])


def _gate(left: Tensors, theirs: str, ours: str) -> Tensors:
    if theirs + "fc1.weight" not in left:
        return {}
    pairs = (("fc1", "squeeze"), ("fc2", "excite"))
    return {f"{ours}{new}.{part}": left.pop(f"{theirs}{old}.{part}") for old, new in pairs for part in WHOLE}


def _all_used(left: Tensors) -> None:
    if left:
        raise BackboneError(
            f"the weights must be those of a MobileCLIP, got unknown tensors such as {next(iter(left))!r}"
        )


def _placed(tensors: Tensors, settings: BackboneConfig) -> Tensors:
    device, dtype = compute_device(settings.device), getattr(torch, settings.dtype)
    placed = {name: tensor.detach().to(device, dtype).contiguous() for name, tensor in tensors.items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in placed.values()):
        raise BackboneError("the weights must be finite, got infinite values or not-a-number: the file is damaged")
    return placed
