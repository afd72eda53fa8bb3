"""Features without prompts, by name, and the pass through the frozen backbone that computes them.

The features of an image must have the same bits in every request, for any batch and any cache state. On a CPU that
holds for passes of one thread over a multiple of eight images: the division of a matrix product among threads, and the
handling of its last rows, change the order of its sums. So passes are padded to such a multiple by repeating an image,
and several passes run at once to use all cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.errors import ConfigError, ContractError
from fedprompt.features.item_store import ItemStore, as_input
from fedprompt.modules.insertion import WITHOUT_BLOCKS

MULTIPLE = 8  # of images in a pass
MOST_IMAGES, MOST_TOKENS = 64, 4096  # in a pass; larger ones are not faster, and cannot be interrupted


@dataclass(frozen=True)
class Feature:
    """One kind of feature of one backbone."""

    name: str
    """Equal for equal features."""
    shape: tuple[int, ...]
    """Of one image."""
    compute: Callable[[Tensor], Tensor]
    """Of embedded images (B, T, d)."""
    cheap: bool = False
    """As fast to compute as to read."""

    @property
    def numbers(self) -> int:
        return int(np.prod(self.shape))


def named(backbone: ViT, name: str) -> Feature:
    """The feature of a name of `Method.needs`."""
    kind, _, count = name.partition(":")
    shape, depth = backbone.shape, backbone.depth
    blocks = int(count) if count.isdecimal() else depth
    whole = name in backbone.reads or name == "block_inputs"
    if not depth and name not in backbone.reads:
        raise ConfigError(WITHOUT_BLOCKS)
    if not whole and (name not in (f"cls:{blocks}", f"block_inputs:{blocks}") or not 1 <= blocks <= depth):
        raise ContractError(f"needs must name known features of blocks 1..{depth}, got {name!r}")
    if kind == "block_inputs":
        inputs = (blocks, shape.tokens, shape.width)
        return Feature(
            f"block_inputs:{blocks}", inputs, lambda x: torch.stack(backbone.block_inputs(x, range(blocks)), 1)
        )
    if kind == "cls":
        return Feature(f"cls:{blocks}", (shape.width,), lambda x: backbone.read_early(x, blocks))
    rows = (shape.patches,) if kind.endswith("patches") else ()
    width = backbone.reads[kind] // (shape.patches if rows else 1)
    return Feature(kind, (*rows, width), lambda x: backbone.run(x, reads=(kind,))[kind])


def block_input(backbone: ViT, block: int) -> Feature:
    """The input of one block, counted after the stem."""
    if not backbone.depth:
        raise ConfigError(WITHOUT_BLOCKS)
    if not 0 <= block < backbone.depth:
        raise ContractError(f"start must be in 0..{backbone.depth - 1}, got {block}")
    shape = (backbone.shape.tokens, backbone.shape.width)
    cheap = block == 0 and not backbone.stem
    return Feature(f"tokens:{block}", shape, lambda x: backbone.block_inputs(x, [block])[0], cheap)


def computed(
    backbone: ViT, store: ItemStore, feature: Feature, indices: np.ndarray
) -> Generator[tuple[np.ndarray, Tensor], None, None]:
    """Features of some images, part by part in their order. Images are decoded while earlier ones are computed."""
    on_cpu = backbone.device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 1
    size = pass_size(len(indices), threads, backbone)

    def decoded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for part in np.split(indices, range(size, len(indices), size)):
            missing = -len(part) % MULTIPLE if on_cpu else 0
            yield part, store.pixels(np.concatenate([part, part[-1:].repeat(missing)]))

    def one_pass(pixels: np.ndarray) -> Tensor:
        with torch.no_grad():
            return feature.compute(backbone.embed(as_input(pixels, backbone)))

    passes = _in_threads(one_pass, decoded(), threads) if threads > 1 else ((p, one_pass(x)) for p, x in decoded())
    with closing(passes):
        yield from ((part, rows[: len(part)]) for part, rows in passes)


def pass_size(images: int, threads: int, backbone: ViT) -> int:
    """Images in a pass: equal shares of the threads, within bounds."""
    most = min(MOST_IMAGES, max(MULTIPLE, MOST_TOKENS // backbone.shape.tokens // MULTIPLE * MULTIPLE))
    share = -(-images // threads)
    return min(most, max(MULTIPLE, -(-share // MULTIPLE) * MULTIPLE))


def _in_threads(
    work: Callable[[np.ndarray], Tensor], given: Iterator[tuple[np.ndarray, np.ndarray]], threads: int
) -> Generator[tuple[np.ndarray, Tensor], None, None]:
    """Several passes at once, each on one core; results in order."""
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    waiting: deque[tuple[np.ndarray, Future[Tensor]]] = deque()
    try:
        for part, pixels in given:
            waiting.append((part, pool.submit(work, pixels)))
            if len(waiting) > threads:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # restores this thread's value; threads that start later take the last value set
