"""Augmented training images: a random resized crop, perhaps mirrored, new in every step.

A *view* is a part of an image: left edge, top edge, width and height as shares of the side, and 1 if it is mirrored. Its
area is uniform in [random_crop, 1], its place uniform among those inside the image. The longer side is 1 to 4/3 times the
shorter one, uniformly, but never longer than the image. Only + - * / and square roots are used, so a view has the same
bits on every machine.

Features of augmented images are computed in every step and stored nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.config import TrainConfig
from fedprompt.data.cache.pixel_store import normalise
from fedprompt.features.compute import Feature, pass_size
from fedprompt.features.item_store import ItemStore
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

LONGEST = 4 / 3  # of the longer side of a crop, as a multiple of the shorter one


def draw_views(train: TrainConfig, count: int, draws: Stream) -> Tensor:
    """Random views (count, 5). Crops do not depend on whether images are mirrored too."""
    area, stretch, left, top, mirror = draws.uniform(count, 5, dtype=torch.float64).unbind(1)
    smallest = 1.0 if train.random_crop is None else train.random_crop
    area = smallest + (1 - smallest) * area
    signed = 2 * stretch - 1  # below 0 the crop is higher than wide
    ratio = 1 + signed.abs() * ((1 / area).clamp(max=LONGEST) - 1)
    long, short = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt()
    width, height = torch.where(signed < 0, short, long), torch.where(signed < 0, long, short)
    mirrored = (mirror < (train.random_flip or 0)).to(area)
    return torch.stack([left * (1 - width), top * (1 - height), width, height, mirrored], dim=1)


def whole_views(count: int) -> Tensor:
    """Views (count, 5) of whole images."""
    return torch.tensor([0.0, 0, 1, 1, 0], dtype=torch.float64).expand(count, 5)


def augmented(images: Tensor, views: Tensor) -> Tensor:
    """What is seen in the views (B, 5) of images (B, channels, S, S), at the same size: linear in rows and columns."""
    side = images.shape[-1]
    left, top, width, height, mirrored = views.unbind(1)
    rows, columns = _places(top, height, side), _places(left, width, side)
    columns = torch.where(mirrored.unsqueeze(1) > 0, columns.flip(1), columns)
    down, across = (_interpolation(places, side).to(images).unsqueeze(1) for places in (rows, columns))
    return down @ images @ across.transpose(-1, -2)


def _places(start: Tensor, length: Tensor, side: int) -> Tensor:
    """Where the centres of `side` new pixels lie among the old ones (B, side), 0 being the centre of the first."""
    centres = torch.arange(side, dtype=torch.float64) + 0.5
    return (start.unsqueeze(1) * side + length.unsqueeze(1) * centres - 0.5).clamp(0, side - 1)


def _interpolation(places: Tensor, side: int) -> Tensor:
    """Weights (B, new, old) of the old pixels: those of the two neighbours of a place sum to 1."""
    return (1 - (places.unsqueeze(-1) - torch.arange(side, dtype=torch.float64)).abs()).clamp(min=0)


def augmented_features(
    backbone: ViT, store: ItemStore, features: Mapping[str, Feature], indices: np.ndarray, views: Tensor
) -> Tensors:
    """Features by name of images of a store as they are seen in their views (B, 5)."""
    parts: dict[str, list[Tensor]] = {name: [] for name in features}
    size = pass_size(len(indices), 1, backbone)
    exact = torch.promote_types(backbone.dtype, torch.float32)
    with torch.no_grad():
        for part, seen in zip(np.split(indices, range(size, len(indices), size)), views.split(size), strict=True):
            images = normalise(store.pixels(part), backbone.mean, backbone.std, exact, backbone.device)
            tokens = backbone.embed(augmented(images, seen))
            for name, feature in features.items():
                parts[name].append(feature.compute(tokens))
    return {name: torch.cat(rows) for name, rows in parts.items()}
