"""Zero-shot classification: class names behind plain words, nothing trained and nothing sent.

    T_c = normalise(mean over templates of g("a photo of a" c)),   logits = scale * I T^T

With permuted class names this must fall to chance, which the check at the start of a run uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.errors import ConfigError, broken
from fedprompt.method import Batch, Client, Method, Seen, Stage, World
from fedprompt.methods.with_text import similarity
from fedprompt.registry import register
from fedprompt.roles import Roles, Tensors


@register("zero_shot")
@dataclass(frozen=True)
class ZeroShot(Method):
    """The dual encoder as it is."""

    templates: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "a photo of a",
    )  #: words before the class name; several are averaged

    @property
    def uses_text(self) -> bool:
        return True

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image",)

    def check(self, world: World, train: TrainConfig) -> None:
        for words in self.templates:
            if not len(world.text.words(words)):
                raise ConfigError(broken("method.templates", "have at least one token each", words))

    def init(self, world: World, generator: torch.Generator) -> Roles:
        return Roles()

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        said = torch.stack([world.text.said(words) for words in self.templates])
        return {"class_features": F.normalize(said.mean(0), dim=-1)}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return ()

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, params["class_features"])
