"""Random vision transformers: built in milliseconds from a seed, with features that differ from image to image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedprompt.backbones.assemble import assemble
from fedprompt.backbones.catalog import TINY, Triple
from fedprompt.backbones.clip import byte_tokenizer, joined
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.rotary import rotation
from fedprompt.backbones.sentence_encoder import SentenceEncoder, assembled
from fedprompt.backbones.shape import ViTShape, tensor_shapes
from fedprompt.backbones.text_tower import CausalTower, TextShape, text_tensor_shapes
from fedprompt.backbones.tokenizer import letters
from fedprompt.backbones.vit import ViT
from fedprompt.config import BackboneConfig

TINY_SHAPE = ViTShape(width=32, depth=3, heads=2, mlp_width=64, patch=4, image_size=TINY.image_size)
TINY_CLIP_SHAPE = replace(TINY_SHAPE, activation="quick_gelu", ln_pre=True)
TINY_TEXT_SHAPE = TextShape(
    width=32,
    depth=2,
    heads=2,
    mlp_width=64,
    vocabulary=514,
    positions=77,
    norm_eps=1e-5,
    activation="quick_gelu",
)
TINY_BERT_SHAPE = replace(TINY_TEXT_SHAPE, depth=3, vocabulary=56, positions=32, norm_eps=1e-12, activation="gelu")
TINY_FEATURES = 128  # dimensions of its shared space: the gate of pFedMoAP needs at least this number


def random_vit(
    shape: ViTShape = TINY_SHAPE, seed: int = 0, name: str = "tiny", dtype: torch.dtype = torch.float32
) -> ViT:
    """A frozen transformer of any shape with seeded random weights, at its native resolution."""
    weights = {key: tensor.to(dtype) for key, tensor in random_weights(shape, seed).items()}
    if shape.rope_base is not None:
        weights["rotation"] = rotation(shape).to(dtype)
    return ViT(name, shape, TINY.mean, TINY.std, weights, native_image_size=shape.image_size)


def tiny_vit(config: BackboneConfig, shape: ViTShape, mean: Triple, std: Triple) -> ViT:
    """The tiny transformer at the resolution, precision and device of a config."""
    tensors = random_weights(shape, seed=0)
    tensors["cls"], tensors["positions"] = tensors.pop("lead"), tensors.pop("position")
    return assemble(tensors, shape, mean, std, config)


def tiny_clip(vision: ViT) -> DualEncoder:
    """A tiny image tower joined to a random causal text tower that has CLIP's tokenizer layout and its 77 positions."""
    tokenise, start, end = byte_tokenizer()
    sizes = text_tensor_shapes(TINY_TEXT_SHAPE, outer_norm="norm")
    sizes |= {"text": (TINY_FEATURES, TINY_TEXT_SHAPE.width), "image": (TINY_FEATURES, vision.shape.width)}
    weights = {name: tensor.to(vision.device, vision.dtype) for name, tensor in random_tensors(sizes, seed=1).items()}
    text, image = (Projection({"linear.weight": weights.pop(side)}) for side in ("text", "image"))
    return joined(vision, CausalTower(TINY_TEXT_SHAPE, weights, tokenise, start, end, text), image, scale=30.0)


def tiny_bert(config: BackboneConfig) -> SentenceEncoder:
    """A tiny encoder of sentences whose tokens are letters."""
    tensors = random_tensors(text_tensor_shapes(TINY_BERT_SHAPE, outer_norm="embedding_norm"), seed=0)
    return assembled(tensors, TINY_BERT_SHAPE, "mean", letters(), config)


def random_weights(shape: ViTShape, seed: int) -> dict[str, Tensor]:
    """The tensors of a vision transformer."""
    return random_tensors(tensor_shapes(shape), seed)


def random_tensors(sizes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Weights large enough that attention is not uniform and the MLP not linear, so that tests detect a wrong forward
    pass.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in sizes.items():
        noise = torch.randn(size, generator=generator)
        around_one = name.endswith(("norm.weight", "ln_pre.weight", "norm1.weight", "norm2.weight", "scale1", "scale2"))
        fan_in = (
            noise[0].numel()
            if noise.ndim > 1 and name not in ("lead", "position", "token.weight", "position.weight")
            else 0
        )
        weights[name] = 1 + 0.1 * noise if around_one else noise * (fan_in**-0.5 if fan_in else 0.2)
    return weights
