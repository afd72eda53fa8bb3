"""One step of visual prompt tuning: ours against the naive way, and how much of the machine's peak it reaches.

The tower has the size of ViT-B/16 at 224 pixels and random weights, which cost the same as trained ones. Every image looks
for its prompts: its un-prompted CLS row, the query, weighs a pool of four, and the ten tokens they come to enter each of
the twelve blocks anew. A step is the forward pass and the gradients of pool, keys and head.

* `naive`: as the research code of prompt tuning does it. Two passes from the pixels, the first for the query; all rows in
  all blocks; softmax(q k') v written out.
* `fused`: the same with torch's fused attention.
* `ours`: `ViT.run`, with queries and inputs of block 0 at hand, as the engine keeps them.

All of them start from the same frozen tensors in float32, and must agree to 1e-5 in features and gradients before anything
is timed. Seconds are CPU time on one thread, so that other work on the machine counts little, and wall-clock time on more.
The ways take turns, and medians are compared.

The share of the peak is that of our step: the FLOPs of the matrix products it really makes (there are no gradients of
weights; scores that the fused attention computes again in its backward pass do not count) in its median of seconds, over
the FLOPs of a large float32 product in the least of its seconds, measured in turns with the step.

    python benchmarks/speed/vit_step.py [--repeats 3] [--batch 8] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.modules.insertion import TokenPrompt

SHAPE = ViTShape(width=768, depth=12, heads=12, mlp_width=3072, patch=16, image_size=224)
BATCH, POOL, PROMPT_TOKENS, CLASSES = 8, 4, 10, 100
PEAK_SIDE = 3072  # of the square matrices whose product tells the peak
TOLERANCE = 1e-5

Leaves = dict[str, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Way = Callable[[Leaves], Tensor]
Result = tuple[Tensor, Leaves]  # features and gradients
Sizes = Sequence[int]


def trainables(generator: torch.Generator) -> Leaves:
    """What a step trains: a pool of deep prompts, the keys that choose among them, and the head."""
    sizes = {
        "pool": (POOL, SHAPE.depth, PROMPT_TOKENS, SHAPE.width),
        "keys": (POOL, SHAPE.width),
        "head": (CLASSES, SHAPE.width),
    }
    return {name: 0.05 * torch.randn(size, generator=generator) for name, size in sizes.items()}


def chosen(leaves: Leaves, query: Tensor) -> Tensor:
    """The prompts (B, L, n, d) of every image, by the likeness of its query to the keys."""
    weights = (query @ leaves["keys"].T / SHAPE.width**0.5).softmax(-1)
    return torch.einsum("bp,plnd->blnd", weights, leaves["pool"])


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1) @ value


def naive_block(weights: Leaves, x: Tensor, attention: Attention) -> Tensor:
    """All rows through all parts of a block."""
    batch, rows, width = x.shape

    def norm(name: str) -> Tensor:
        return F.layer_norm(x, (width,), weights[name + ".weight"], weights[name + ".bias"], SHAPE.norm_eps)

    def linear(name: str, y: Tensor) -> Tensor:
        return F.linear(y, weights[name + ".weight"], weights[name + ".bias"])

    parts = linear("attention.in", norm("norm1")).reshape(batch, rows, 3, SHAPE.heads, width // SHAPE.heads)
    mixed = attention(*parts.permute(2, 0, 3, 1, 4)).transpose(1, 2).reshape(batch, rows, width)
    x = x + linear("attention.out", mixed)
    return x + linear("mlp.out", F.gelu(linear("mlp.in", norm("norm2"))))


def naive_cls(vit: ViT, images: Tensor, prompts: Tensor | None, attention: Attention) -> Tensor:
    """The CLS row (B, d) from the pixels on, with tokens (B, L, n, d) that are thrown away and replaced at every block."""
    w, batch = vit.weights, len(images)
    patches = F.conv2d(images, w["patch.weight"], w["patch.bias"], stride=SHAPE.patch).flatten(2).transpose(1, 2)
    x = torch.cat([w["lead"].expand(batch, -1, -1), patches + w["position"]], dim=1)
    for number in range(SHAPE.depth):
        prefix = f"blocks.{number}."
        block = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
        if prompts is not None:
            x = torch.cat([x[:, :1], prompts[:, number], x[:, -SHAPE.patches :]], dim=1)
        x = naive_block(block, x, attention)
    return F.layer_norm(x, (SHAPE.width,), w["norm.weight"], w["norm.bias"], SHAPE.norm_eps)[:, 0]


def naive_way(vit: ViT, images: Tensor, attention: Attention) -> Way:
    def features(leaves: Leaves) -> Tensor:
        with torch.no_grad():
            query = naive_cls(vit, images, None, attention)
        return naive_cls(vit, images, chosen(leaves, query), attention)

    return features


def our_way(vit: ViT, images: Tensor) -> Way:
    with torch.no_grad():
        tokens = vit.embed(images)
        query = vit.run(tokens)["cls"]

    def features(leaves: Leaves) -> Tensor:
        return vit.run(tokens, [TokenPrompt(chosen(leaves, query), tuple(range(SHAPE.depth)))])["cls"]

    return features


def step(way: Way, start: Leaves, labels: Tensor) -> Result:
    """The features and the gradients of one step."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    features = way(leaves)
    loss = F.cross_entropy(features @ leaves["head"].T, labels)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return features.detach(), dict(zip(leaves, gradients, strict=True))


def difference(found: Result, expected: Result) -> float:
    """The largest among features and gradients, each in units of its own largest number."""
    pairs = [(found[0], expected[0]), *((found[1][name], gradient) for name, gradient in expected[1].items())]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def attention_flops() -> dict[Any, Callable[..., int]]:
    """The FLOPs of torch's fused attention on a CPU, which its own counter does not know."""

    def forward(query: Sizes, key: Sizes, *_: object, **__: object) -> int:
        batch, heads, rows, width = query
        return 2 * 2 * batch * heads * rows * key[2] * width

    def backward(gradient: Sizes, query: Sizes, key: Sizes, *_: object, **__: object) -> int:
        return 2 * forward(query, key)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return {attention: forward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}


def counted(make: Callable[[], Result]) -> tuple[Result, float]:
    """What is made, and the FLOPs of all its matrix products, those inside of the fused attention included."""
    counter = FlopCounterMode(display=False, custom_mapping=attention_flops())
    with counter:
        made = make()
    return made, float(counter.get_total_flops())


def seconds(make: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    make()
    return clock() - began


def measure(repeats: int, batch: int = BATCH) -> dict[str, object]:
    """Time a step of each way with as many threads as torch has."""
    generator = torch.Generator().manual_seed(0)
    vit = random_vit(SHAPE, seed=1, name="vit-b16")
    images = torch.randn(batch, 3, SHAPE.image_size, SHAPE.image_size, generator=generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    start = trainables(generator)
    ways = {
        "naive": naive_way(vit, images, plain_attention),
        "fused": naive_way(vit, images, F.scaled_dot_product_attention),
        "ours": our_way(vit, images),
    }
    found = {name: counted(partial(step, way, start, labels)) for name, way in ways.items()}  # also the warm-up
    off = {name: difference(found[name][0], found["naive"][0]) for name in ("fused", "ours")}
    if max(off.values()) > TOLERANCE:
        raise RuntimeError(f"the ways must agree to {TOLERANCE}, got {off}")
    left, right = (torch.randn(PEAK_SIDE, PEAK_SIDE, generator=generator) for _ in range(2))
    product = partial(torch.mm, left, right, out=torch.empty_like(left))
    product()
    steps: dict[str, Callable[[], object]] = {name: partial(step, way, start, labels) for name, way in ways.items()}
    steps["product"] = product
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name in ("naive", "product", "fused", "product", "ours", "product"):
            times[name].append(seconds(steps[name]))
    medians = {name: statistics.median(values) for name, values in times.items()}
    peak = 2 * PEAK_SIDE**3 / min(times["product"])
    return {
        "what": "one step of deep visual prompts chosen by query, ViT-B/16 at 224 pixels, float32",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "batch": batch,
        "seconds": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "median": {name: round(value, 3) for name, value in medians.items()},
        "gflops_of_a_step": {name: round(count / 1e9) for name, (_, count) in found.items()},
        "times_faster": {name: round(medians[name] / medians["ours"], 2) for name in ("naive", "fused")},
        "peak_gflops_per_second": round(peak / 1e9, 1),
        "share_of_peak": round(found["ours"][1] / medians["ours"] / peak, 3),
        "largest_relative_difference": off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step of visual prompt tuning against the naive way.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = json.dumps(measure(arguments.repeats, arguments.batch), indent=2)
    Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
