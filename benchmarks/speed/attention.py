"""What attention in bfloat16 gains on a processor by being written out (`layers.attention`), against torch's own.

Ratios of CPU time of one thread, the least of several repeats, both ways in turn (A B A B ...) in one process: attention
alone forward and with its gradients, and a training step of deep prompts through a random ViT-S under autocast.

    python benchmarks/speed/attention.py [--repeats 15] [--output benchmarks/speed/attention.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.modules.insertion import TokenPrompt

SHAPES = {  # images, heads, rows, width of a head
    "ViT-S, 98 px, 64 images": (64, 6, 57, 64),
    "ViT-B, 224 px, 4 images": (4, 12, 207, 64),
    "MiniLM, 37 names": (37, 12, 12, 32),
    "CLIP's text tower, 30 names": (30, 8, 77, 64),
}
SHAPE = ViTShape(width=384, depth=4, heads=6, mlp_width=1536, patch=14, image_size=98)
IMAGES, TOKENS = 32, 6


def torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **given: object) -> Tensor:
    """As it was."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **given)  # type: ignore[arg-type]


def in_turn(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of CPU time, the least of the repeats."""
    least = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        way()
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.process_time()
            way()
            least[name] = min(least[name], 1e3 * (time.process_time() - began))
    return least


def attention_alone(shape: tuple[int, int, int, int], gradients: bool, repeats: int) -> dict[str, float]:
    images, heads, rows, width = shape
    made = [torch.randn(images, rows, heads, width, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    inputs = [each.detach().requires_grad_(gradients) for each in made[:3]]

    def once(attend: Callable[..., Tensor]) -> None:
        mixed = attend(*inputs)
        if gradients:
            torch.autograd.grad(mixed, inputs, made[3])

    return in_turn({"ours": lambda: once(layers.attention), "torch": lambda: once(torchs)}, repeats)


def training_step(repeats: int) -> dict[str, float]:
    vit = random_vit(SHAPE, seed=0).autocasting()
    tokens = vit.embed(torch.randn(IMAGES, 3, SHAPE.image_size, SHAPE.image_size))
    prompts = torch.randn(SHAPE.depth, TOKENS, SHAPE.width, requires_grad=True)

    def step() -> None:
        cls = vit.run(tokens, [TokenPrompt(prompts, tuple(range(SHAPE.depth)))])["cls"]
        torch.autograd.grad(cls.float().square().mean(), prompts)

    def before() -> None:
        with patch.object(layers, "attention", torchs):
            step()

    return in_turn({"ours": step, "torch": before}, repeats)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--output", type=Path)
    asked = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {
        f"{name}, {'with gradients' if gradients else 'forward'}": attention_alone(shape, gradients, asked.repeats)
        for name, shape in SHAPES.items()
        for gradients in (False, True)
    }
    found[f"training step: {SHAPE.depth} prompted blocks of ViT-S, {IMAGES} images"] = training_step(asked.repeats)
    for name, each in found.items():
        each["ratio"] = each["torch"] / each["ours"]
        print(f"{name:55} ours {each['ours']:7.2f} ms  torch {each['torch']:7.2f} ms  {each['ratio']:.2f}x")
    if asked.output:
        about = {"torch": torch.__version__, "processor": platform.machine(), "threads": 1, "repeats": asked.repeats}
        asked.output.write_text(json.dumps({"about": about, "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
