"""The images of one client as the backbone wants them, and un-prompted features computed once.

Features are computed in chunks of fixed size and order, so that they are the same bits whenever and wherever they are computed. Which ones
are kept depends on the sizes alone: a feature whose rows for all images of all clients fit into `KEPT_BYTES` is kept in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.data.manifest import Manifest
from fedprompt.data.sources import Source
from fedprompt.data.transforms import ImageStore, normalise
from fedprompt.errors import ContractError
from fedprompt.roles import Tensors

CHUNK = 64
KEPT_BYTES = 2 * 2**30  #: per kind of feature


@dataclass(frozen=True)
class Images:
    """The training or test images of one client. Positions count from 0 within the client."""

    indices: np.ndarray
    labels: Tensor
    domains: np.ndarray
    store: ImageStore
    backbone: ViT
    cached: Tensors
    everybodys: int  #: images of all clients together

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: float, end: float, order: Tensor) -> Images:
        """The images from one share to another in a given order; at least one."""
        first = min(int(start * len(self) + 0.5), len(self) - 1)
        chosen = order[first : max(first + 1, int(end * len(self) + 0.5))]
        return _Part(
            self.indices[chosen.numpy()],
            self.labels[chosen.to(self.labels.device)],
            self.domains[chosen.numpy()],
            self.store,
            self.backbone,
            {},
            self.everybodys,
            whole=self,
            positions=chosen,
        )

    def tokens(self, positions: Tensor, start: int = 0) -> Tensor:
        """Embedded images: the input of the first block that prompts can reach."""
        if start:
            return self.features(f"block_inputs:{start + 1}", positions)[:, start]
        return self.features("block_inputs:1", positions)[:, 0] if self.backbone.stem else self._embed(positions)

    def features(self, name: str, positions: Tensor) -> Tensor:
        """Un-prompted features by the names of `Method.needs`."""
        kind, _, count = name.partition(":")
        shape, depth = self.backbone.shape, self.backbone.depth
        blocks = int(count) if count.isdecimal() else depth
        whole = name in self.backbone.reads or name == "block_inputs"
        if not whole and (name not in (f"cls:{blocks}", f"block_inputs:{blocks}") or not 1 <= blocks <= depth):
            raise ContractError(f"needs must name known features of blocks 1..{depth}, got {name!r}")
        numbers = blocks * shape.tokens * shape.width if kind == "block_inputs" else self.backbone.reads[kind]
        kept = numbers * self.backbone.dtype.itemsize * self.everybodys <= KEPT_BYTES
        if not kept:
            return self._compute(kind, blocks, self._embed(positions))
        if name not in self.cached:
            parts = torch.arange(len(self)).split(CHUNK)
            self.cached[name] = torch.cat([self._compute(kind, blocks, self._embed(part)) for part in parts])
        return self.cached[name][positions.to(self.backbone.device)]

    def _compute(self, kind: str, blocks: int, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            if kind == "block_inputs":
                return torch.stack(self.backbone.block_inputs(tokens, range(blocks)), dim=1)
            if kind == "cls":
                return self.backbone.read_early(tokens, blocks)
            return self.backbone.run(tokens, reads=(kind,))[kind]

    def _embed(self, positions: Tensor) -> Tensor:
        pixels = self.store.pixels(self.indices[positions.numpy()])
        backbone = self.backbone
        with torch.no_grad():
            return backbone.embed(normalise(pixels, backbone.mean, backbone.std, backbone.dtype, backbone.device))


@dataclass(frozen=True)
class _Part(Images):
    """Some of a client's images, which share the features kept for all of them."""

    whole: Images
    positions: Tensor

    def features(self, name: str, positions: Tensor) -> Tensor:
        return self.whole.features(name, self.positions[positions])


class ImageBank:
    """Every client's images; nothing is decoded or computed before it is asked for.

    Features outlive the bank until one with other images or another backbone is made: the runs of a sweep over methods share them.
    """

    _latest: ClassVar[tuple[object, dict[tuple[int, str], Tensors]]] = (None, {})

    def __init__(self, source: Source, manifest: Manifest, store: ImageStore, backbone: ViT) -> None:
        self._source, self._manifest, self._store, self._backbone = source, manifest, store, backbone
        identity = (manifest.checksum, store.path.name, backbone.digest(), backbone.device, backbone.dtype, KEPT_BYTES)
        if ImageBank._latest[0] != identity:
            ImageBank._latest = (identity, {})
        self._cached = ImageBank._latest[1]
        self._everybodys = sum(len(client.train) + len(client.test) for client in manifest.clients)

    def images(self, client: int, part: str) -> Images:
        holder = self._manifest.clients[client]
        indices = holder.train if part == "train" else holder.test
        return Images(
            indices=indices,
            labels=torch.from_numpy(self._source.labels[indices]).to(self._backbone.device),
            domains=self._source.domains[indices],
            store=self._store,
            backbone=self._backbone,
            cached=self._cached.setdefault((client, part), {}),
            everybodys=self._everybodys,
        )

    @property
    def backbone(self) -> ViT:
        return self._backbone

    def features(self, name: str, indices: Tensor) -> Tensor:
        images = self.images(0, "train")
        from dataclasses import replace
        images = replace(images, indices=indices.numpy(), cached={}, everybodys=10**12)
        return images.features(name, torch.arange(len(indices)))

    def tokens(self, indices: Tensor, start: int = 0) -> Tensor:
        images = self.images(0, "train")
        from dataclasses import replace
        images = replace(images, indices=indices.numpy(), cached={}, everybodys=10**12)
        return images.tokens(torch.arange(len(indices)), start)
