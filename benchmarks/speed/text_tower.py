"""How much the shortcuts of the causal text tower save: one training step, against the naive way in the same run.

The tower has the size of the one of CLIP ViT-B/16 (width 512, 12 blocks, 8 heads, 49,408 tokens, 77 positions) and random
weights, which cost the same as trained ones. A step is the forward pass of 100 classes behind a context of 16 tokens and
the gradient of the context.

* `naive`: every class as a sentence of 77 tokens, all rows through all blocks in one batch, causal attention.
* `cut`: the same, without the rows behind the end of the longest sentence.
* `ours`: `CausalTower.encode`.

All three call the same torch operations with the same precision. Seconds are CPU time of one thread, so that other work on
the machine counts little; the three take turns, and medians are compared. The class names are not real ones, because no
CLIP tokenizer is at hand: they have 1 to 4 tokens, most of them 1 or 2, as short names of things do.

    python benchmarks/speed/text_tower.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.text import CausalTower, TextShape, text_tensor_shapes
from fedprompt.backbones.tiny import random_tensors

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
FEATURES = 512
CONTEXT_TOKENS = 16
CLASSES_BY_LENGTH = {1: 50, 2: 33, 3: 13, 4: 4}  #: how many class names have so many tokens
STOP, START, END = 269, 49406, 49407


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


def naive(tower: CausalTower, names: list[list[int]], context: Tensor, length: int) -> Tensor:
    """Unit vectors (C, D): every sentence padded to `length` tokens, all rows computed."""
    w, eps = tower.weights, SHAPE.norm_eps
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


def step(encode: Callable[[Tensor], Tensor], context: Tensor, weights: Tensor) -> tuple[float, Tensor, Tensor]:
    """CPU seconds of forward and backward, the features and the gradient."""
    leaf = context.clone().requires_grad_()
    began = time.process_time()
    features = encode(leaf)
    (gradient,) = torch.autograd.grad((features * weights).sum(), leaf)
    return time.process_time() - began, features.detach(), gradient


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def measure(repeats: int) -> dict[str, object]:
    names = name_ids()
    tower = tower_of(names)
    spoken = tower.names([str(number) for number in range(len(names))])
    longest = 1 + CONTEXT_TOKENS + max(map(len, names)) + 2
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "naive": lambda context: naive(tower, names, context, SHAPE.positions),
        "cut": lambda context: naive(tower, names, context, longest),
        "ours": lambda context: tower.encode(context[None], spoken)[0],
    }
    generator = torch.Generator().manual_seed(2)
    context = 0.02 * torch.randn(CONTEXT_TOKENS, SHAPE.width, generator=generator)
    weights = torch.randn(len(names), FEATURES, generator=generator)
    results = {way: step(encode, context, weights) for way, encode in ways.items()}  # also the warm-up
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, encode in ways.items():
            seconds[way].append(step(encode, context, weights)[0])
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    _, features, gradient = results["naive"]
    return {
        "what": "one training step of a 16-token context, 100 classes, a text tower of CLIP ViT-B/16's size, one thread",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu_seconds": {way: [round(value, 3) for value in times] for way, times in seconds.items()},
        "median": {way: round(value, 3) for way, value in medians.items()},
        "times_faster_than_naive": {way: round(medians["naive"] / medians[way], 2) for way in ("cut", "ours")},
        "largest_difference_of_features": float((results["ours"][1] - features).abs().max()),
        "largest_relative_difference_of_gradients": relative(results["ours"][2], gradient),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the causal text tower against the naive way.")
    parser.add_argument("--repeats", type=int, default=3)
    torch.set_num_threads(1)
    result = measure(parser.parse_args().repeats)
    text = json.dumps(result, indent=2)
    Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
