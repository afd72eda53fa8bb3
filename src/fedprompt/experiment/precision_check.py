"""Whether products in bfloat16 are faster on this processor, measured: many have no instructions for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fedprompt.backbones import layers
from fedprompt.backbones.vit import ViT
from fedprompt.config import BackboneConfig

ROWS, REPEATS = 512, 5
SLOWER = 1.05  # times float32, from which on a warning is worth reading

Timed = Callable[[Callable[[], object]], float]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def autocast_note(config: BackboneConfig, backbone: ViT, timed: Timed = seconds) -> str | None:
    """A sentence where `backbone.autocast` makes passes slower. A GPU is not asked."""
    if not config.autocast or backbone.device.type != "cpu":
        return None
    width = backbone.shape.width
    rows, weight = torch.ones(ROWS, width, dtype=backbone.dtype), torch.ones(4 * width, width, dtype=backbone.dtype)

    def product(autocast: bool) -> object:
        with layers.precision(autocast, backbone.device):
            return torch.nn.functional.linear(rows, weight)

    product(True)  # the first time also prepares
    product(False)
    pairs = [(timed(lambda: product(True)), timed(lambda: product(False))) for _ in range(REPEATS)]
    short, plain = (min(values) for values in zip(*pairs, strict=True))
    if short <= SLOWER * plain:
        return None
    name = str(backbone.dtype).removeprefix("torch.")
    return (
        f"backbone.autocast is slower on this processor: a product takes {short / plain:.1f} times as long in bfloat16 as "
        f"in {name}"
    )
