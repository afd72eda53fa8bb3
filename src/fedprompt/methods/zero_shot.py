"""Zero-shot classification: class names after fixed words, nothing trained and nothing sent.

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
from fedprompt.core.method import Batch, Client, Method, Seen, Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import precise, similarity
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors


@register("zero_shot")
@dataclass(frozen=True)
class ZeroShot(Method):
    """The unchanged dual encoder."""

    templates: Annotated[tuple[str, ...], Field(min_length=1)] = ("a photo of a",)
    """Words before the class name; several are averaged."""

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

    def init(self, world: World, generator: Stream) -> Roles:
        return Roles()

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        said = torch.stack([world.text.encode_words(words) for words in self.templates])
        return {"class_features": F.normalize(precise(said).mean(0), dim=-1)}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return ()

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, params["class_features"])
