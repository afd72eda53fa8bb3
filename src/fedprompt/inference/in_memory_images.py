"""Pixels in memory as the images of a client: nothing is written to disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.sentence_encoder import SentenceEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.data.sources.base import NO_DOMAINS, Source
from fedprompt.errors import ConfigError, DataError, broken
from fedprompt.features.compute import Feature, computed
from fedprompt.features.feature_tables import FeatureTables
from fedprompt.features.image_bank import Images


class GivenPixels(ImageStore):
    """A store of given pixels."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels
        self.cache, self.key = Path(), ""

    def pixels(self, indices: np.ndarray) -> np.ndarray:
        return self._pixels[indices]

    def known(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), dtype=bool)


class Nameless(Source):
    """`count` images without labels: all labels are 0, and no prediction may depend on them."""

    def __init__(self, count: int) -> None:
        self.name, self.class_names, self.domain_names, self.fingerprint = "images", ("0",), NO_DOMAINS, ""
        self.labels, self.domains, self.splits = np.zeros(count, np.int64), np.zeros(count, np.int64), None

    def image(self, index: int) -> None:  # type: ignore[override]
        raise DataError(broken("image", "be requested as pixels", index))


class GivenFeatures(FeatureTables):
    """Features of given pixels, each kind computed once, by the same code as in a run: the results are bit-identical."""

    def __init__(self, pixels: np.ndarray, backbone: ViT) -> None:
        count = len(pixels)
        super().__init__(Nameless(count), np.zeros(count, np.int64), GivenPixels(pixels), backbone)
        self._found: dict[str, Tensor] = {}

    def _rows(self, feature: Feature, indices: np.ndarray, alone: bool = False) -> Tensor:
        if feature.name not in self._found:
            everything = np.arange(len(self.source))
            parts = [rows for _, rows in computed(self._plain, self.store, feature, everything)]
            self._found[feature.name] = torch.cat(parts)
        return self._found[feature.name][torch.from_numpy(indices).to(self.backbone.device)]


def require_images(backbone: ViT, what: str) -> None:
    """Raise where the backbone reads sentences."""
    if isinstance(backbone, SentenceEncoder):
        raise ConfigError(broken("backbone.name", f"be a backbone of images for {what}", backbone.name))


def blank(backbone: ViT) -> np.ndarray:
    """One black image, or one sentence without words."""
    if isinstance(backbone, SentenceEncoder):
        return backbone.ids("")[None]
    side = backbone.shape.image_size
    return np.zeros((1, side, side, 3), dtype=np.uint8)


def as_images(pixels: np.ndarray, backbone: ViT) -> Images:
    """Pixels (B, S, S, 3) uint8 of the backbone's size as a client's images; of sentences, token numbers (B, T) int32."""
    side = backbone.shape.image_size
    if isinstance(backbone, SentenceEncoder):
        if pixels.dtype != np.int32 or pixels.shape[1:] != (backbone.shape.max_tokens,) or not len(pixels):
            rule = f"be int32 of shape (sentences, {backbone.shape.max_tokens}), one sentence at least"
            raise DataError(broken("tokens", rule, f"{pixels.dtype} of {pixels.shape}"))
    elif pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (side, side, 3) or not len(pixels):
        rule = f"be uint8 of shape (images, {side}, {side}, 3), one image at least"
        raise DataError(broken("pixels", rule, f"{pixels.dtype} of {pixels.shape}"))
    return Images.of(GivenFeatures(pixels, backbone), np.arange(len(pixels)))
