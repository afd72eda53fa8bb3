"""An image tower and a text tower that meet in one space.

A `DualEncoder` is a vision transformer in every respect. Besides, what its image tower saw can be read as unit vectors of
the shared space, in which its text tower puts class names. Logits are scale * <image, text>.

| read | shape | what |
|---|---|---|
| `image` | (B, D) | the whole image |
| `image_patches` | (B, M, D) | every patch, by the same map |

CLIP maps its CLS row. A bridge may map [CLS ; mean of the patches], told by its width; patch m then stands for the mean in [CLS ; patch m].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprompt.backbones.layers import update_digest
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.text import TextTower
from fedprompt.backbones.vit import ViT
from fedprompt.errors import BackboneError, broken
from fedprompt.prompts.contexts import Language, Position
from fedprompt.prompts.insertion import VisionPrompt

JOINT_READS = ("image", "image_patches")


@dataclass(frozen=True, eq=False, kw_only=True)
class DualEncoder(ViT):
    """A frozen pair of towers."""

    text: TextTower
    image_projection: Projection
    scale: float  #: of the logits

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

    @property
    def features(self) -> int:
        """D, dimensions of the shared space."""
        return self.image_projection.features

    @property
    def reads(self) -> dict[str, int]:
        joint = {"image": self.features, "image_patches": self.shape.patches * self.features}
        return {**super().reads, **joint}

    @property
    def averages_patches(self) -> bool:
        return self.image_projection.width == 2 * self.shape.width

    def run(
        self,
        tokens: Tensor,
        prompts: Sequence[VisionPrompt] = (),
        reads: Iterable[str] = ("cls",),
        start: int = 0,
        pause: tuple[int, Callable[[Tensor], Sequence[VisionPrompt]]] | None = None,
    ) -> dict[str, Tensor]:
        """As `ViT.run`, and `image` and `image_patches` can be read too."""
        wanted = frozenset(reads)
        rows = set(wanted.difference(JOINT_READS))
        if "image" in wanted or ("image_patches" in wanted and self.averages_patches):
            rows.add("cls")
        if "image_patches" in wanted or ("image" in wanted and self.averages_patches):
            rows.add("patches")
        seen = super().run(tokens, prompts, rows, start, pause)
        if "image" in wanted:
            row = seen["cls"]
            mean = [seen["patches"].mean(1)] if self.averages_patches else []
            seen["image"] = self.image_projection(torch.cat([row, *mean], dim=-1))
        if "image_patches" in wanted:
            patches = seen["patches"]
            whole = [seen["cls"].unsqueeze(1).expand_as(patches)] if self.averages_patches else []
            seen["image_patches"] = self.image_projection(torch.cat([*whole, patches], dim=-1))
        return {name: seen[name] for name in wanted}

    def language(self, class_names: Sequence[str]) -> Language:
        """The text side, ready to say these class names."""
        names = self.text.names(class_names)

        def encode(contexts: Tensor, position: Position) -> Tensor:
            return self.text.encode(contexts, names, position)

        return Language(self.text.shape.width, self.features, self.scale, self.text.words, encode)

    def digest(self) -> str:
        sha = hashlib.sha256(f"{super().digest()} {self.text.digest()} {self.scale}".encode())
        update_digest(sha, self.image_projection.weights)
        return sha.hexdigest()
