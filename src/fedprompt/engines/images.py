"""The images of one client as the backbone wants them, and un-prompted features computed once.

Features are computed in chunks of fixed size and order, so that they are the same bits whenever and wherever they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.data.manifest import Manifest
from fedprompt.data.sources import Source
from fedprompt.data.transforms import ImageStore, normalise
from fedprompt.roles import Tensors

CHUNK = 64


@dataclass(frozen=True)
class Images:
    """The training or test images of one client. Positions count from 0 within the client."""

    indices: np.ndarray
    labels: Tensor
    domains: np.ndarray
    store: ImageStore
    backbone: ViT
    cached: Tensors

    def __len__(self) -> int:
        return len(self.indices)

    def tokens(self, positions: Tensor) -> Tensor:
        """Embedded images: the input of the first block."""
        pixels = self.store.pixels(self.indices[positions.numpy()])
        backbone = self.backbone
        with torch.no_grad():
            return backbone.embed(normalise(pixels, backbone.mean, backbone.std, backbone.dtype, backbone.device))

    def features(self, name: str, positions: Tensor) -> Tensor:
        """Un-prompted features: "cls" is cached, the large ones are computed when asked for."""
        if name == "cls":
            return self._cls()[positions.to(self.backbone.device)]
        tokens = self.tokens(positions)
        with torch.no_grad():
            if name == "block_inputs":
                return torch.stack(self.backbone.block_inputs(tokens), dim=1)
            return self.backbone.run(tokens, reads=(name,))[name]

    def _cls(self) -> Tensor:
        if "cls" not in self.cached:
            parts = torch.arange(len(self)).split(CHUNK)
            with torch.no_grad():
                self.cached["cls"] = torch.cat([self.backbone.run(self.tokens(part))["cls"] for part in parts])
        return self.cached["cls"]


class ImageBank:
    """Every client's images; nothing is decoded or computed before it is asked for."""

    def __init__(self, source: Source, manifest: Manifest, store: ImageStore, backbone: ViT) -> None:
        self._source, self._manifest, self._store, self._backbone = source, manifest, store, backbone
        self._cached: dict[tuple[int, str], Tensors] = {}

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
        )
