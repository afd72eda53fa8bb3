"""Features without prompts of the images of a source, each computed once if it can be stored.

A feature belongs to an image, so all clients, partitions, seeds and methods share it. A kind of feature that fits into
the rest of `engine.memory_gib` is kept in memory. It is also written to a file of the cache, within `engine.disk_gib`,
for later runs and other processes; a kind that fits only there is read from the file. What fits nowhere is computed on
demand. Only sizes and settings decide, and the bits are the same in all cases (see `compute.py`). Features of augmented
images are computed for every batch and never stored.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedprompt.backbones.block import run_block
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_cache import code_digest, identity
from fedprompt.config import EngineConfig
from fedprompt.data.cache.prefetch import Background
from fedprompt.data.sources.base import Source
from fedprompt.features.augmentation import augmented_features
from fedprompt.features.compute import Feature, block_input, computed, named
from fedprompt.features.feature_rows import MEMORY, SUFFIX, FileRows, MemoryRows, Rows
from fedprompt.features.item_store import ItemStore
from fedprompt.tensors import Tensors

RECIPE = 1  # raise it when the passes give other bits, so that old files are not used
GIB = 2**30
TOKENS = "tokens"
NEIGHBOURS = 1024  # largest number of images that are computed along with others


def tokens_name(start: int) -> str:
    """The name of the inputs of one block, in addition to the names of `Method.needs`."""
    return f"{TOKENS}:{start}"


class LoadedRows(dict[str, Tensor]):
    """Features of the images of one batch by name; those that were not announced are loaded on demand."""

    def __init__(self, load: Callable[[Sequence[str]], Tensors], names: Sequence[str]) -> None:
        super().__init__(load(names))
        self._load = load

    @classmethod
    def at_hand(cls, rows: Tensors) -> LoadedRows:
        """Rows that are there already, and no others."""
        return cls(lambda names: {name: rows[name] for name in names}, tuple(rows))

    def __missing__(self, name: str) -> Tensor:
        self.update(self._load([name]))
        return self[name]


class FeatureTables:
    """Features of a source's images, and where they are stored.

    `groups` has a number for every image of the source. Images of one number are requested together, so when one is
    computed, some of the others are too, in full passes. Images of number -1 are never requested.
    """

    def __init__(
        self, source: Source, groups: np.ndarray, store: ItemStore, backbone: ViT, engine: EngineConfig | None = None
    ) -> None:
        engine = engine or EngineConfig()
        self.source, self.store, self.backbone = source, store, backbone
        self._plain = replace(backbone, block=run_block)  # a compiled one rounds differently
        self._dtype = torch.bfloat16 if engine.cache_dtype == "bfloat16" else backbone.dtype  # of what is stored
        self.labels = torch.from_numpy(np.asarray(source.labels, dtype=np.int64)).to(backbone.device)
        self._groups = groups
        self._memory, self._disk = int(engine.memory_gib * GIB), int(engine.disk_gib * GIB)
        self._features: dict[str, Feature] = {}
        self._places: dict[str, tuple[Rows, ...]] = {}
        self._background = Background()

    def features(self, name: str, indices: Tensor, alone: bool = False) -> Tensor:
        """Features, by a name of `Method.needs`, of images in any order. With `alone` no other images are computed
        along.
        """
        return self._rows(self._feature(name), indices.numpy(), alone)

    def tokens(self, indices: Tensor, start: int = 0) -> Tensor:
        """The inputs (B, T, d) of one block, for passes that no prompt enters below it."""
        return self._rows(self._feature(tokens_name(start)), indices.numpy())

    def load(self, indices: Tensor, names: Sequence[str], views: Tensor | None = None) -> LoadedRows:
        """All data a step reads of its images, by the names of `prefetch`; with `views` of augmented images, computed anew."""
        wanted = indices.numpy()

        def stored(names: Sequence[str]) -> Tensors:
            return {name: self._rows(self._feature(name), wanted) for name in names}

        def anew(names: Sequence[str]) -> Tensors:
            assert views is not None
            features = {name: self._feature(name) for name in names}
            return augmented_features(self._plain, self.store, features, wanted, views)

        return LoadedRows(stored if views is None else anew, tuple(dict.fromkeys(names)))

    def prefetch(self, indices: Tensor, names: Sequence[str]) -> None:
        """Begin to decode, in the background, those of these images whose features must be computed.

        In addition to the names of `Method.needs`, "tokens" and "tokens:q" announce `tokens` of block 0 and q.
        """
        features = [self._feature(name) for name in names]
        wanted = np.unique(indices.numpy())
        wanted = wanted[~self.store.known(wanted)]
        lacking = np.zeros(len(wanted), dtype=bool)
        for feature in features:
            lacking |= ~_anywhere([rows.known(wanted) for rows in self._kept(feature)], wanted)
        if lacking.any():
            self._background.ask(lambda: self._decode_ahead(features, wanted[lacking]))

    def decode_ahead(self, indices: Tensor) -> None:
        """Begin to decode, in the background, those of these images that are not at hand."""
        wanted = np.unique(indices.numpy())
        wanted = wanted[~self.store.known(wanted)]
        if len(wanted):
            self._background.ask(lambda: self.store.decode_ahead(wanted))

    def settle(self) -> None:
        """Wait for all work in the background."""
        self._background.wait()

    def _decode_ahead(self, features: Sequence[Feature], wanted: np.ndarray) -> None:
        lacking = np.zeros(len(wanted), dtype=bool)
        for feature in features:
            lacking |= ~_anywhere([rows.holds(wanted) for rows in self._kept(feature)], wanted)
        self.store.decode_ahead(wanted[lacking])

    def _rows(self, feature: Feature, indices: np.ndarray, alone: bool = False) -> Tensor:
        """In the backbone's precision, and rounded to that of the store wherever they come from."""
        return self._stored(feature, indices, alone).to(self.backbone.dtype)

    def _stored(self, feature: Feature, indices: np.ndarray, alone: bool) -> Tensor:
        if not len(indices):
            return self._new_rows(feature).take(indices)
        kept = self._kept(feature)
        for rows in kept:
            if rows.known(indices).all():
                return rows.take(indices)
        wanted = np.unique(indices)
        if not alone and any(not rows.full for rows in kept):
            wanted = np.union1d(wanted, self._neighbours(kept, wanted))
        return _gathered((*kept, *self._fill(feature, wanted)), indices)

    def _neighbours(self, kept: Sequence[Rows], indices: np.ndarray) -> np.ndarray:
        """Images to compute together with those of these that are missing."""
        absent = indices[~_anywhere([rows.known(indices) for rows in kept], indices)]
        groups = np.unique(self._groups[absent])
        images, numbers = self._by_group
        first, last = np.searchsorted(numbers, groups, "left"), np.searchsorted(numbers, groups, "right")
        spans = [images[a:b] for group, a, b in zip(groups, first, last, strict=True) if group >= 0]
        near = np.concatenate([indices[:0], *spans])
        return near[~_anywhere([rows.known(near) for rows in kept], near)][:NEIGHBOURS]

    def _fill(self, feature: Feature, indices: np.ndarray) -> list[Rows]:
        """Compute and store what is missing of these images; rows that could not be stored are returned."""
        kept = self._kept(feature)
        for rows in kept:
            here = rows.holds(indices)
            if rows is not kept[0] and here.any():
                kept[0].put(indices[here], rows.take(indices[here]))
            indices = indices[~here]
        if not len(indices):
            return []
        over: list[tuple[np.ndarray, Tensor]] = []
        with closing(computed(self._plain, self.store, feature, indices)) as parts:
            for part, values in parts:
                for rows in kept:
                    rows.put(part, values)
                left = ~_anywhere([rows.known(part) for rows in kept], part)
                if left.any():
                    over.append((part[left], values[torch.from_numpy(left)]))
        return [self._loose(feature, over)] if over else []

    def _loose(self, feature: Feature, parts: Sequence[tuple[np.ndarray, Tensor]]) -> Rows:
        rows = self._new_rows(feature)
        rows.reserve(np.concatenate([part for part, _ in parts]))
        for part, values in parts:
            rows.put(part, values)
        return rows

    def _feature(self, name: str) -> Feature:
        if name not in self._features:
            kind, _, block = name.partition(":")
            own = kind == TOKENS and (not block or block.lstrip("-").isdecimal())
            found = block_input(self._plain, int(block or 0)) if own else named(self._plain, name)
            self._features[name] = found
        return self._features[name]

    def _kept(self, feature: Feature) -> tuple[Rows, ...]:
        """Where a feature is stored, the fastest place first."""
        if feature.name not in self._places:
            self._places[feature.name] = tuple(self._find_places(feature))
        return self._places[feature.name]

    def _find_places(self, feature: Feature) -> list[Rows]:
        size = len(self._held) * feature.numbers * self._dtype.itemsize
        key = self._key(feature)
        places: list[Rows] = []
        memory = MEMORY.rows(key, self._held, self._memory, self, lambda: self._new_rows(feature))
        if memory is not None:
            places.append(memory)
        if size <= self._disk and not feature.cheap:
            path = self.store.cache / "features" / f"{key}{SUFFIX}"
            backbone, images = self.backbone, len(self.source)
            places.append(FileRows(path, images, feature.shape, self._dtype, backbone.device, self._disk))
        return places

    def _new_rows(self, feature: Feature) -> MemoryRows:
        return MemoryRows(len(self.source), feature.shape, self._dtype, self.backbone.device)

    @cached_property
    def _held(self) -> np.ndarray:
        """The images that may be requested."""
        return np.flatnonzero(self._groups >= 0)

    @cached_property
    def _by_group(self) -> tuple[np.ndarray, np.ndarray]:
        """All images in the order of their groups, and these."""
        images = np.argsort(self._groups, kind="stable")
        return images, self._groups[images]

    def _key(self, feature: Feature) -> str:
        """Everything that determines the bits of a feature."""
        described = [RECIPE, feature.name, self.store.key, *self._ground]
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]
        return f"{feature.name.replace(':', '-')}-{digest}"

    @cached_property
    def _ground(self) -> list[str]:
        backbone = self.backbone
        precision = str(backbone.dtype) if self._dtype == backbone.dtype else f"{backbone.dtype} as {self._dtype}"
        return [identity(backbone), code_digest(), precision, torch.__version__, _hardware(backbone.device)]


def _hardware(device: torch.device) -> str:
    """The kind of processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _anywhere(held: Sequence[np.ndarray], indices: np.ndarray) -> np.ndarray:
    return np.logical_or.reduce([np.zeros(len(indices), dtype=bool), *held])


def _gathered(places: Sequence[Rows], indices: np.ndarray) -> Tensor:
    """The rows of images that are all stored, perhaps in several places."""
    parts, order = [], []
    left = np.arange(len(indices))
    for rows in places:
        here = rows.known(indices[left])
        if here.any():
            parts.append(rows.take(indices[left[here]]))
            order.append(left[here])
        left = left[~here]
    if len(parts) == 1:
        return parts[0]
    back = torch.from_numpy(np.argsort(np.concatenate(order))).to(parts[0].device)
    return torch.cat(parts).index_select(0, back)
