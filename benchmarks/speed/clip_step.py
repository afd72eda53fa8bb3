"""One step of text-prompt tuning with CLIP: ours against the naive way, in the same run.

The towers have the size of CLIP ViT-B/16 (text: width 512, 12 blocks, 8 heads, 49,408 tokens, 77 positions; image: width
768, 12 blocks, 224 pixels) and random weights, which cost the same as trained ones. A step is the loss of 32 images over 100
classes behind a context of 16 tokens, and the gradient of the context.

* `naive`: every class as a sentence of 77 tokens, all rows through all blocks in one batch, causal attention; and the images
  go through their tower, without gradients. It is our own image tower, which computes less than the usual ones.
* `ours`: `CausalTower.encode`, and image features that are at hand, as the engine keeps them.

Both call the same torch operations with the same precision, and must agree before their times count. Seconds are CPU time of
one thread, so that other work on the machine counts little; the two take turns, and medians are compared. The class names are
not real ones, because no CLIP tokenizer is at hand: they have 1 to 4 tokens, most of them 1 or 2, as short names of things do.

    python benchmarks/speed/clip_step.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.random_weights import random_tensors, random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.text_tower import CausalTower, TextShape, text_tensor_shapes

SHAPE = TextShape(
    width=512,
    depth=12,
    heads=8,
    mlp_width=2048,
    vocabulary=49408,
    positions=77,
    norm_eps=1e-5,
    activation="quick_gelu",
)
VISION = ViTShape(
    width=768, depth=12, heads=12, mlp_width=3072, patch=16, image_size=224, activation="quick_gelu", ln_pre=True
)
FEATURES, SCALE = 512, 100.0
BATCH, CONTEXT_TOKENS = 32, 16
CLASSES_BY_LENGTH = {1: 50, 2: 33, 3: 13, 4: 4}  # how many class names have so many tokens
STOP, START, END = 269, 49406, 49407
TOLERANCE = 1e-5


def name_ids() -> list[list[int]]:
    """Token ids of 100 class names."""
    lengths = [length for length, classes in CLASSES_BY_LENGTH.items() for _ in range(classes)]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    return [torch.randint(400, 49000, (lengths[place],), generator=generator).tolist() for place in order]


def tower_of(names: list[list[int]]) -> CausalTower:
    """A random tower whose tokenizer knows the class names "0", "1" and so on."""
    tensors = random_tensors(
        {**text_tensor_shapes(SHAPE, outer_norm="norm"), "into.weight": (FEATURES, SHAPE.width)}, seed=1
    )
    into = Projection({"linear.weight": tensors.pop("into.weight")})

    def tokenise(text: str) -> list[int]:
        return [*names[int(text.removesuffix("."))], *([STOP] if text.endswith(".") else [])]

    return CausalTower(SHAPE, tensors, tokenise, START, END, into)


def naive_text(tower: CausalTower, names: list[list[int]], context: Tensor) -> Tensor:
    """Unit vectors (C, D): every sentence padded to all positions, all rows computed."""
    w, eps, length = tower.weights, SHAPE.norm_eps, SHAPE.positions
    ends = torch.tensor([1 + CONTEXT_TOKENS + len(name) + 1 for name in names])
    behind = [[*name, STOP, END] for name in names]
    suffix = torch.tensor([ids + [0] * (length - 1 - CONTEXT_TOKENS - len(ids)) for ids in behind])
    start, words = w["token.weight"][START].expand(len(names), 1, -1), w["token.weight"][suffix]
    x = torch.cat([start, context.expand(len(names), -1, -1), words], dim=1) + w["position.weight"][:length]
    for number in range(SHAPE.depth):
        block = f"blocks.{number}."
        inner = layers.linear(w, block + "attention.in", layers.norm(w, block + "norm1", x, eps))
        query, key, value = layers.split_heads(inner, SHAPE.heads, 3)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + layers.linear(w, block + "attention.out", mixed)
        hidden = layers.linear(w, block + "mlp.in", layers.norm(w, block + "norm2", x, eps))
        x = x + layers.linear(w, block + "mlp.out", layers.activate(SHAPE.activation, hidden))
    rows = layers.norm(w, "norm", x, eps)[torch.arange(len(names)), ends]
    return tower.projection(rows)


def naive_images() -> Callable[[], Tensor]:
    """A pass of 32 images through the image tower: unit vectors (B, D)."""
    vit = random_vit(VISION, seed=3)
    into = Projection(random_tensors({"linear.weight": (FEATURES, VISION.width)}, seed=4))
    side = VISION.image_size
    images = torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(5))

    @torch.no_grad()
    def see() -> Tensor:
        return into(vit.run(vit.embed(images), reads=("cls",))["cls"])

    return see


@dataclass(frozen=True)
class Step:
    """What a step cost and what came out."""

    image: float  # CPU seconds of the image side
    text: float  # and of the rest
    loss: Tensor
    gradient: Tensor


def step(see: Callable[[], Tensor], encode: Callable[[Tensor], Tensor], context: Tensor, labels: Tensor) -> Step:
    leaf = context.clone().requires_grad_()
    began = time.process_time()
    image = see()
    seen = time.process_time()
    loss = F.cross_entropy(SCALE * image @ encode(leaf).T, labels)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return Step(seen - began, time.process_time() - seen, loss.detach(), gradient)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def measure(repeats: int) -> dict[str, object]:
    names = name_ids()
    tower = tower_of(names)
    spoken = tower.names([str(number) for number in range(len(names))])
    see = naive_images()
    kept = see()
    generator = torch.Generator().manual_seed(2)
    context = 0.02 * torch.randn(CONTEXT_TOKENS, SHAPE.width, generator=generator)
    labels = torch.randint(len(names), (BATCH,), generator=generator)
    ways: dict[str, Callable[[], Step]] = {
        "naive": lambda: step(see, lambda leaf: naive_text(tower, names, leaf), context, labels),
        "ours": lambda: step(lambda: kept, lambda leaf: tower.encode(leaf[None], spoken)[0], context, labels),
    }
    first = {way: make() for way, make in ways.items()}  # also the warm-up
    off = {
        "loss": relative(first["ours"].loss, first["naive"].loss),
        "gradient": relative(first["ours"].gradient, first["naive"].gradient),
    }
    if max(off.values()) > TOLERANCE:
        raise SystemExit(f"the two ways must agree to {TOLERANCE:g}, got {off}")
    steps: dict[str, list[Step]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, make in ways.items():
            steps[way].append(make())
    whole = {way: statistics.median(each.image + each.text for each in found) for way, found in steps.items()}
    text = {way: statistics.median(each.text for each in found) for way, found in steps.items()}
    return {
        "what": "one step of a 16-token context, 100 classes, 32 images, towers of CLIP ViT-B/16's size, one thread",
        "cpu_seconds": {
            way: [{"image": round(each.image, 4), "text": round(each.text, 4)} for each in found]
            for way, found in steps.items()
        },
        "median": whole,
        "median_of_text": text,
        "largest_relative_difference": off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step of text-prompt tuning against the naive way.")
    parser.add_argument("--repeats", type=int, default=3)
    torch.set_num_threads(1)
    print(json.dumps(measure(parser.parse_args().repeats), indent=2))


if __name__ == "__main__":
    main()
