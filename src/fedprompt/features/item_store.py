"""What a backbone reads of the items of a source: pixels of images, or token numbers of sentences."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.sentence_encoder import SentenceEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.data.sources.base import Source
from fedprompt.errors import DataError, broken


class ItemStore(Protocol):
    """The items of a source as arrays, decoded when they are first needed."""

    cache: Path
    key: str
    """Equal for equal arrays."""

    def pixels(self, indices: np.ndarray) -> np.ndarray:
        """The arrays of some items, stacked."""
        ...

    def known(self, indices: np.ndarray) -> np.ndarray:
        """Which items are at hand."""
        ...

    def decode_ahead(self, indices: np.ndarray) -> None:
        """Decode what is absent of these items."""
        ...


class TokenStore:
    """Token numbers of the sentences of a source, in memory."""

    def __init__(self, source: Source, backbone: SentenceEncoder, cache: Path) -> None:
        self._source, self._backbone, self.cache = source, backbone, cache
        self._rows = np.empty((len(source), backbone.shape.max_tokens), dtype=np.int32)
        self._read = np.zeros(len(source), dtype=bool)
        self.key = f"tokens-{hashlib.sha256(source.fingerprint.encode()).hexdigest()[:24]}"

    def pixels(self, indices: np.ndarray) -> np.ndarray:
        for index in np.unique(indices[~self._read[indices]]).tolist():
            self._rows[index] = self._backbone.ids(self._source.sentence(index))
            self._read[index] = True
        return self._rows[indices]

    def known(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), dtype=bool)  # reading a sentence takes no time

    def decode_ahead(self, indices: np.ndarray) -> None:
        pass


def check_kind(source: Source, backbone: ViT) -> None:
    """Raise unless the backbone reads what the source holds."""
    wanted = "sentences" if isinstance(backbone, SentenceEncoder) else "images"
    if source.holds != wanted:
        rule = f"hold {wanted} for backbone.name {backbone.name!r} (`minilm` reads sentences, the others images)"
        raise DataError(broken("data.source", rule, source.holds))


def open_store(source: Source, backbone: ViT, resize: str, cache: Path) -> ItemStore:
    """The items of a source as this backbone reads them."""
    check_kind(source, backbone)
    if isinstance(backbone, SentenceEncoder):
        return TokenStore(source, backbone, cache)
    return ImageStore(source, backbone.shape.image_size, resize, cache)


def as_input(rows: np.ndarray, backbone: ViT) -> Tensor:
    """Arrays of a store as `ViT.embed` takes them."""
    if isinstance(backbone, SentenceEncoder):
        return torch.from_numpy(np.ascontiguousarray(rows)).to(backbone.device)
    return normalise(rows, backbone.mean, backbone.std, backbone.dtype, backbone.device)
