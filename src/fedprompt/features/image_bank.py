"""The images of one client in the form the backbone reads, and those of all clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.config import EngineConfig
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.sources.open import Source
from fedprompt.features.feature_tables import FeatureTables, LoadedRows, tokens_name
from fedprompt.features.item_store import ItemStore


@dataclass(frozen=True, eq=False)
class Images:
    """The training, test or validation images of one client. Positions count from 0 within the client."""

    indices: np.ndarray
    """Of the source."""
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
    def store(self) -> ItemStore:
        return self.tables.store

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: float, end: float, order: Tensor) -> Images:
        """The images between two shares of a given order; at least one."""
        first = min(int(start * len(self) + 0.5), len(self) - 1)
        chosen = order[first : max(first + 1, int(end * len(self) + 0.5))]
        return replace(
            self,
            indices=self.indices[chosen.numpy()],
            labels=self.labels[chosen.to(self.labels.device)],
            domains=self.domains[chosen.numpy()],
        )

    def features(self, name: str, positions: Tensor) -> Tensor:
        """Features without prompts by the names of `Method.needs`."""
        return self.tables.features(name, self._at(positions))

    def tokens(self, positions: Tensor, start: int = 0) -> Tensor:
        """The inputs of a block, counted after the stem; of the first one, the embedded images."""
        return self.tables.tokens(self._at(positions), start)

    def load(self, positions: Tensor, names: Sequence[str], views: Tensor | None = None) -> LoadedImages:
        """Some of the images, or `views` of them, with the data a step reads, by the names of `ImageBank.prefetch`."""
        rows = self.tables.load(self._at(positions), names, views)
        return LoadedImages(self.backbone, self.labels[positions.to(self.labels.device)], rows)

    def _at(self, positions: Tensor) -> Tensor:
        return torch.from_numpy(self.indices[positions.numpy()])


@dataclass(frozen=True, eq=False)
class LoadedImages:
    """The images of one batch, decoded before its step begins. Positions count from 0 within the batch."""

    backbone: ViT
    labels: Tensor
    rows: LoadedRows
    """Features and tokens by name."""

    def __len__(self) -> int:
        return len(self.labels)

    def features(self, name: str, positions: Tensor) -> Tensor:
        """As `Images.features`."""
        return self.rows[name][positions]

    def tokens(self, positions: Tensor, start: int = 0) -> Tensor:
        """As `Images.tokens`."""
        return self.rows[tokens_name(start)][positions]


class ImageBank:
    """Every client's images; all decoding and computing is on demand."""

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        store: ItemStore,
        backbone: ViT,
        engine: EngineConfig | None = None,
    ) -> None:
        self._clients = manifest.clients.parts
        groups = np.full(len(source), -1, dtype=np.int64)
        for number, lists in enumerate(self._clients.values()):
            groups[lists.values] = number * len(manifest.clients) + lists.owners
        self.tables = FeatureTables(source, groups, store, backbone, engine)

    @property
    def backbone(self) -> ViT:
        return self.tables.backbone

    def images(self, client: int, part: str) -> Images:
        """A client's "train", "test" or "validation" images."""
        return Images.of(self.tables, self._clients[part][client])

    def sizes(self, part: str) -> np.ndarray:
        """How many images every client has."""
        return self._clients[part].sizes

    def features(self, name: str, indices: Tensor) -> Tensor:
        """Features without prompts of images of the source, of any client, by the names of `Method.needs`."""
        return self.tables.features(name, indices)

    def tokens(self, indices: Tensor, start: int = 0) -> Tensor:
        """The inputs of one block, counted after the stem."""
        return self.tables.tokens(indices, start)

    def load(self, indices: Tensor, names: Sequence[str], views: Tensor | None = None) -> LoadedRows:
        """Features and tokens of images of the source, or of `views` of them, by the names of `prefetch`."""
        return self.tables.load(indices, names, views)

    def prefetch(self, indices: Tensor, names: Sequence[str]) -> None:
        """Begin to decode, in the background, the images that are needed for these features and "tokens"."""
        self.tables.prefetch(indices, names)

    def decode_ahead(self, indices: Tensor) -> None:
        """Begin to decode these images in the background."""
        self.tables.decode_ahead(indices)


class CommonImages(ImageBank):
    """A bank in which every client holds the same images."""

    def __init__(self, images: Images) -> None:
        self._images, self.tables = images, images.tables

    @classmethod
    def of(
        cls, source: Source, indices: np.ndarray, store: ItemStore, backbone: ViT, engine: EngineConfig
    ) -> CommonImages:
        """Some images of a source."""
        groups = np.full(len(source), -1, dtype=np.int64)
        groups[indices] = 0
        return cls(Images.of(FeatureTables(source, groups, store, backbone, engine), indices))

    def images(self, client: int, part: str) -> Images:
        return self._images
