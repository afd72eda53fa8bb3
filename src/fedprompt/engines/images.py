"""The images of one client as the backbone wants them, and those of all clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.config import EngineConfig
from fedprompt.data.manifest import Manifest
from fedprompt.data.sources import Source
from fedprompt.data.transforms import ImageStore
from fedprompt.engines.features import FeatureTables


@dataclass(frozen=True, eq=False)
class Images:
    """The training or test images of one client. Positions count from 0 within the client."""

    indices: np.ndarray  #: of the source
    labels: Tensor
    domains: np.ndarray
    tables: FeatureTables

    @classmethod
    def of(cls, tables: FeatureTables, indices: np.ndarray) -> Images:
        """Some images of a source."""
        labels = tables.labels[torch.from_numpy(indices).to(tables.labels.device)]
        return cls(indices, labels, tables.source.domains[indices], tables)

    @property
    def backbone(self) -> ViT:
        return self.tables.backbone

    @property
    def store(self) -> ImageStore:
        return self.tables.store

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: float, end: float, order: Tensor) -> Images:
        """The images from one share to another in a given order; at least one."""
        first = min(int(start * len(self) + 0.5), len(self) - 1)
        chosen = order[first : max(first + 1, int(end * len(self) + 0.5))]
        return replace(
            self,
            indices=self.indices[chosen.numpy()],
            labels=self.labels[chosen.to(self.labels.device)],
            domains=self.domains[chosen.numpy()],
        )

    def features(self, name: str, positions: Tensor) -> Tensor:
        """Un-prompted features by the names of `Method.needs`."""
        return self.tables.features(name, self._at(positions))

    def tokens(self, positions: Tensor, start: int = 0) -> Tensor:
        """The inputs of a block that prompts can reach, counted behind the stem; of the first one, the embedded images."""
        return self.tables.tokens(self._at(positions), start)

    def _at(self, positions: Tensor) -> Tensor:
        return torch.from_numpy(self.indices[positions.numpy()])


class ImageBank:
    """Every client's images; nothing is decoded or computed before it is asked for."""

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        store: ImageStore,
        backbone: ViT,
        engine: EngineConfig | None = None,
    ) -> None:
        self._clients = {"train": manifest.clients.train, "test": manifest.clients.test}
        groups = np.full(len(source), -1, dtype=np.int64)
        for first, lists in zip((0, len(manifest.clients)), self._clients.values(), strict=True):
            groups[lists.values] = first + lists.owners
        self.tables = FeatureTables(source, groups, store, backbone, engine)

    @property
    def backbone(self) -> ViT:
        return self.tables.backbone

    def images(self, client: int, part: str) -> Images:
        """A client's "train" or "test" images."""
        return Images.of(self.tables, self._clients[part][client])

    def sizes(self, part: str) -> np.ndarray:
        """How many images every client has."""
        return self._clients[part].sizes

    def features(self, name: str, indices: Tensor) -> Tensor:
        """Un-prompted features of images of the source, whoever holds them, by the names of `Method.needs`."""
        return self.tables.features(name, indices)

    def tokens(self, indices: Tensor, start: int = 0) -> Tensor:
        """The inputs of one block, counted behind the stem."""
        return self.tables.tokens(indices, start)

    def prefetch(self, indices: Tensor, names: Sequence[str]) -> None:
        """Begin to decode, in the background, what features and "tokens" of these images have to be computed from."""
        self.tables.prefetch(indices, names)


class CommonImages(ImageBank):
    """A bank in which every client holds the same images."""

    def __init__(self, images: Images) -> None:
        self._images, self.tables = images, images.tables

    @classmethod
    def of(
        cls, source: Source, indices: np.ndarray, store: ImageStore, backbone: ViT, engine: EngineConfig
    ) -> CommonImages:
        """Some images of a source."""
        groups = np.full(len(source), -1, dtype=np.int64)
        groups[indices] = 0
        return cls(Images.of(FeatureTables(source, groups, store, backbone, engine), indices))

    def images(self, client: int, part: str) -> Images:
        return self._images
