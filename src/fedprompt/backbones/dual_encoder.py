"""An image tower and a text tower that map into one space.

A `DualEncoder` is a vision transformer. In addition, its image features can be read as unit vectors of the shared
space, into which its text tower maps class names. Logits are scale * <image, text> + bias.

| read | shape | what |
|---|---|---|
| `image` | (B, D) | the whole image |
| `image_raw` | (B, D) | the same before it is normalised to length 1 |
| `image_patches` | (B, M, D) | every patch, by the same map |

The length of `image_raw` is part of what CLIP learned, about 10. A bridge was trained on unit vectors only, so the length of
its vectors (850 for `mini`, 390 for `b16`) means nothing; they are scaled to about 10 (`RAW_SCALES`).

CLIP maps its CLS row. A bridge may map [CLS ; mean of the patches], known by its width; for patch m it then maps [CLS ;
patch m].
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from fedprompt.backbones.layers import update_digest
from fedprompt.backbones.projection import Projection, unit
from fedprompt.backbones.text_tower import TextTower
from fedprompt.backbones.vit import ViT
from fedprompt.errors import BackboneError, broken
from fedprompt.modules.contexts import Language, Position
from fedprompt.modules.insertion import TokenPrompt

RAW_SCALES = {"mini": 1 / 85, "b16": 1 / 39}  # of the bridges
JOINT_READS = ("image", "image_raw", "image_patches")
REMEMBERED_BYTES = 256 * 2**20  # of text features, per set of class names


class Memory:
    """Text features by the content of their context; those used longest ago are dropped first."""

    def __init__(self, capacity: int) -> None:
        self._kept: OrderedDict[tuple[Position, str], Tensor] = OrderedDict()
        self._capacity, self._bytes = capacity, 0

    def get(self, position: Position, context: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        sha = hashlib.sha256()
        update_digest(sha, {"context": context})
        key = (position, sha.hexdigest())
        if key not in self._kept:
            self._kept[key] = encode(context)
            self._bytes += self._kept[key].nbytes
        self._kept.move_to_end(key)
        found = self._kept[key]
        while self._bytes > self._capacity and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class DualEncoder(ViT):
    """A frozen pair of towers."""

    text: TextTower
    image_projection: Projection
    scale: float
    """Of the logits."""
    bias: float = 0.0
    """Added to the logits (SigLIP). It is the same for all classes, so it cancels in a softmax over them."""

    def __post_init__(self) -> None:
        width = self.shape.width
        if self.image_projection.width not in (width, 2 * width):
            raise BackboneError(
                f"the image projection of {self.name!r} must take {width} or {2 * width} numbers, "
                f"got one that takes {self.image_projection.width}"
            )
        if self.image_projection.features != self.text.projection.features:
            raise BackboneError(
                f"both projections of {self.name!r} must lead into one space, got "
                f"{self.image_projection.features} and {self.text.projection.features} dimensions"
            )
        if not 0 < self.scale < math.inf:
            raise BackboneError(broken(f"the logit scale of {self.name!r}", "be positive and finite", self.scale))
        if not math.isfinite(self.bias):
            raise BackboneError(broken(f"the logit bias of {self.name!r}", "be finite", self.bias))

    @property
    def features(self) -> int:
        """D, dimensions of the shared space."""
        return self.image_projection.features

    @property
    def reads(self) -> dict[str, int]:
        joint = {
            "image": self.features,
            "image_raw": self.features,
            "image_patches": self.shape.patches * self.features,
        }
        return {**super().reads, **joint}

    @property
    def raw_scale(self) -> float:
        """Factor on vectors that are not normalised."""
        return RAW_SCALES.get(self.name, 1.0)

    @property
    def averages_patches(self) -> bool:
        return self.image_projection.width == 2 * self.shape.width

    def autocasting(self) -> Self:
        """Both towers; the projections are unchanged, because a vector in bfloat16 would not have unit length."""
        return dataclasses.replace(super().autocasting(), text=dataclasses.replace(self.text, autocast=True))

    def run(
        self,
        tokens: Tensor,
        prompts: Sequence[TokenPrompt] = (),
        reads: Iterable[str] = ("cls",),
        start: int = 0,
        pause: tuple[int, Callable[[Tensor], Sequence[TokenPrompt]]] | None = None,
        repeat: int = 1,
    ) -> dict[str, Tensor]:
        """As `ViT.run`, and `image`, `image_raw` and `image_patches` can be read too."""
        wanted = frozenset(reads)
        whole_image = bool(wanted & {"image", "image_raw"})
        rows = set(wanted.difference(JOINT_READS))
        if whole_image or ("image_patches" in wanted and self.averages_patches):
            rows.add("cls")
        if "image_patches" in wanted or (whole_image and self.averages_patches):
            rows.add("patches")
        seen = super().run(tokens, prompts, rows, start, pause, repeat)
        if whole_image:
            row = seen["cls"]
            mean = [seen["patches"].mean(1)] if self.averages_patches else []
            vectors = self.image_projection.raw(torch.cat([row, *mean], dim=-1))
            seen["image_raw"] = self.raw_scale * vectors
            seen["image"] = unit(vectors)
        if "image_patches" in wanted:
            patches = seen["patches"]
            whole = [seen["cls"].unsqueeze(1).expand_as(patches)] if self.averages_patches else []
            seen["image_patches"] = self.image_projection(torch.cat([*whole, patches], dim=-1))
        return {name: seen[name] for name in wanted}

    def encode_classes(self, context: Tensor, class_names: Sequence[str], position: Position = "end") -> Tensor:
        """Unit vectors (C, D) of class names in a context (m, d), or each in its own (C, m, d)."""
        return self.text.encode(context.unsqueeze(0), self.text.names(class_names), position)[0]

    def language(self, class_names: Sequence[str]) -> Language:
        """The text side for these class names.

        Contexts without gradients are encoded one by one and cached: the clients of a process share their experts.
        """
        names = self.text.names(class_names)
        memory = Memory(REMEMBERED_BYTES)

        def encode(contexts: Tensor, position: Position) -> Tensor:
            if torch.is_grad_enabled():
                return self.text.encode(contexts, names, position)
            each = [
                memory.get(position, context, lambda one: self.text.encode(one.unsqueeze(0), names, position))
                for context in contexts
            ]
            return torch.cat([contexts.new_empty(0, len(class_names), self.features), *each])

        @cache
        def encode_names() -> Tensor:
            bare = dataclasses.replace(names, stops=((),) * len(names.ids), layouts={})
            with torch.no_grad():
                return self.text.encode(self.text.words("").unsqueeze(0), bare)[0]

        def encode_unstored(contexts: Tensor, position: Position, changes: Mapping[str, Tensor]) -> Tensor:
            tower = self.text.with_added(changes) if changes else self.text
            return tower.encode(contexts, names, position)

        width, room = self.text.shape.width, self.text.room(names)
        return Language(
            width,
            self.features,
            self.scale,
            self.text.words,
            encode,
            room,
            encode_names,
            self.bias,
            encode_unstored,
            self.text.shape.depth,
            cache(self.language),
        )

    def digest(self) -> str:
        sha = hashlib.sha256(f"{super().digest()} {self.text.digest()} {self.scale}".encode())
        if self.bias:
            sha.update(str(self.bias).encode())
        update_digest(sha, self.image_projection.weights)
        return sha.hexdigest()
