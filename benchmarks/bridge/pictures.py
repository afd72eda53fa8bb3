"""Pictures and their features from an image tower, computed once and kept in the work folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import emoji
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedprompt.assets import prepare
from fedprompt.backbones.assemble import assemble
from fedprompt.backbones.catalog import CLIP_MEAN, CLIP_STD
from fedprompt.backbones.key_mapping import canonical
from fedprompt.backbones.load import CLIP_B16_SHAPE, load_backbone
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_file
from fedprompt.config import BackboneConfig, DataConfig
from fedprompt.data.cache.pixel_store import normalise, resized
from fedprompt.data.sources.open import open_source

Ranks = tuple[int, int]  # first and end of a cut of images per cell
ALL: Ranks = (0, 10**6)


@dataclass(frozen=True)
class Plan:
    """Which tower sees how many pictures. The sets are read in parts, so that an interrupted run can go on."""

    tower: str
    image_size: int
    with_patches: bool  # the bridge reads [CLS ; mean of the patches] and not CLS alone
    chunk: int
    photos: tuple[Ranks, ...]  # parts of TinyImageNet's training images
    emoji: int | None  # pictures of each emoji; None takes every font and look
    report: dict[str, tuple[Ranks, ...]]  # parts of the test images of the report sets


PLANS = {
    "mini": Plan(
        tower="dinov2-small",
        image_size=98,
        with_patches=True,
        chunk=50,
        photos=((0, 10), (10, 40), (40, 70), (70, 100)),
        emoji=None,
        report={
            "pacs": (ALL,),
            "office_caltech10": (ALL,),
            "cifar10": ((0, 200),),
            "oxford_pets": (ALL,),
            "caltech101": (ALL,),
        },
    ),
    "b16": Plan(
        tower="clip-b16-image",
        image_size=112,
        with_patches=False,
        chunk=32,
        photos=((0, 2), (2, 4), (4, 6), (6, 8)),
        emoji=1,
        report={
            "pacs": ((0, 8),),
            "office_caltech10": ((0, 5),),
            "cifar10": ((0, 20),),
            "oxford_pets": ((0, 6),),
            "caltech101": ((0, 3),),
        },
    ),
}


@dataclass(frozen=True)
class Features:
    rows: Tensor  # (n, d_in), what a bridge reads
    labels: Tensor  # (n,)
    looks: Tensor  # (n,) domain of a report set, or look of an emoji


class Gallery:
    """Features of the sets of one plan."""

    def __init__(self, plan: Plan, data: Path, packages: Path, work: Path, cache: Path) -> None:
        self._plan, self._data, self._packages, self._work, self._cache = plan, data, packages, work, cache
        self._tower: ViT | None = None

    def photos(self) -> Features:
        """The training photographs."""
        return _joined([self._part("tiny_imagenet", "train", ranks) for ranks in self._plan.photos])

    def report(self, name: str) -> Features:
        """The test images of a report set."""
        return _joined([self._part(name, "test", ranks) for ranks in self._plan.report[name]])

    def pictograms(self, entries: list[emoji.Emoji], seed: int) -> Features:
        """The training pictograms, all of them or so many of each."""
        if self._plan.emoji is None:
            return self._kept("emoji", self._drawn(entries, seed, None))
        return _joined([self._kept(f"emoji-{n}", self._drawn(entries, seed, n)) for n in range(self._plan.emoji)])

    def _drawn(
        self, entries: list[emoji.Emoji], seed: int, number: int | None
    ) -> Iterator[tuple[Image.Image, int, int]]:
        """All drawings, or one of each emoji, its font and look taking turns."""
        fonts: dict[tuple[int, str], int] = {}
        for index, name, picture in emoji.draw(self._packages, entries, seed):
            font, forward = fonts.get((index, name), 0), emoji.LOOKS.index(name)
            fonts[index, name] = font + 1
            if number is None or (font, forward) == ((index // 3 + number) % 3, (index + number) % 3):
                yield picture, index, forward

    def _part(self, name: str, split: str, ranks: Ranks) -> Features:
        source = open_source(DataConfig(source=str(self._data / f"{name}.parquet")), self._cache)
        if source.splits is None or source.ranks is None:
            raise SystemExit(f"{name}.parquet must have the columns split and rank")
        chosen = np.flatnonzero((source.splits == split) & (source.ranks >= ranks[0]) & (source.ranks < ranks[1]))
        images = ((source.image(int(at)), int(source.labels[at]), int(source.domains[at])) for at in chosen)
        return self._kept(f"{name}-{split}-{ranks[0]}-{ranks[1]}", images)

    def _kept(self, name: str, images: Iterable[tuple[Image.Image, int, int]]) -> Features:
        path = self._work / f"{self._plan.tower}-{self._plan.image_size}-{name}.npz"
        if not path.is_file():
            rows, labels, looks = self._computed(images)
            np.savez(path, rows=rows, labels=labels, looks=looks)
        with np.load(path) as kept:
            return Features(*(torch.from_numpy(kept[field]) for field in ("rows", "labels", "looks")))

    def _computed(self, images: Iterable[tuple[Image.Image, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows: list[Tensor] = []
        labels: list[int] = []
        looks: list[int] = []
        waiting: list[np.ndarray] = []
        for image, label, forward in images:
            waiting.append(resized(image, self._plan.image_size, "squash"))
            labels.append(label)
            looks.append(forward)
            if len(waiting) == self._plan.chunk:
                rows.append(self._features(np.stack(waiting)))
                waiting.clear()
        if waiting:
            rows.append(self._features(np.stack(waiting)))
        return torch.cat(rows).numpy(), np.array(labels), np.array(looks)

    @torch.no_grad()
    def _features(self, pixels: np.ndarray) -> Tensor:
        if self._tower is None:
            self._tower = image_tower(self._plan, self._cache)
        tower = self._tower
        tokens = tower.embed(normalise(pixels, tower.mean, tower.std, tower.dtype, tower.device))
        if not self._plan.with_patches:
            return tower.run(tokens)["cls"]
        read = tower.run(tokens, reads=("cls", "patches"))
        return torch.cat([read["cls"], read["patches"].mean(1)], dim=1)


def image_tower(plan: Plan, cache: Path) -> ViT:
    """The bare image tower, without any bridge."""
    config = BackboneConfig(name=plan.tower, image_size=plan.image_size)
    if plan.tower != "clip-b16-image":
        return load_backbone(config, cache)
    return assemble(canonical(read_file(prepare(plan.tower, cache))), CLIP_B16_SHAPE, CLIP_MEAN, CLIP_STD, config)


def clip_projection(cache: Path) -> Tensor:
    """CLIP's own way (512, 768) from the CLS row to its shared space."""
    return read_file(prepare("clip-b16-image", cache))["visual_projection.weight"].float()


def _joined(parts: list[Features]) -> Features:
    return Features(*(torch.cat([getattr(part, field) for part in parts]) for field in ("rows", "labels", "looks")))
