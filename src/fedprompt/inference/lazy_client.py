"""A client whose training images are opened only when a method reads them.

Most methods predict from tensors alone, so most runs can be used without their images. Methods that fine-tune on a
client's training images before a test, or choose by their loss, read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from fedprompt.backbones.vit import ViT
from fedprompt.client.local_training import TrainingResult
from fedprompt.client.runtime import ClientRuntime
from fedprompt.core.method import Client, Progress, Stage
from fedprompt.errors import DivergenceError
from fedprompt.features.image_bank import ImageBank, Images
from fedprompt.random_streams import stream
from fedprompt.tensors import Tensors


class LazyBank(ImageBank):
    """A bank that is made when an image is read."""

    def __init__(self, backbone: ViT, make: Callable[[], ImageBank]) -> None:
        self._backbone, self._make = backbone, make

    @cached_property
    def _bank(self) -> ImageBank:
        return self._make()

    @property
    def used(self) -> bool:
        """Whether an image was read."""
        return "_bank" in vars(self)

    @property
    def backbone(self) -> ViT:
        return self._backbone

    def images(self, client: int, part: str) -> Images:
        return self._bank.images(client, part)

    def __getattr__(self, name: str) -> Any:  # attributes that `ImageBank.__init__` would have set
        if name in ("tables", "_clients"):
            return getattr(self._bank, name)
        raise AttributeError(name)


class LateClient(Client):
    """A client that counts its images on demand."""

    def __init__(self, index: int, name: str, round: int, seed: int, known: Callable[[], Client]) -> None:
        fields = {
            "index": index,
            "name": name,
            "round": round,
            "stream": lambda purpose: stream(seed, round, index, purpose),
            "loss": lambda params: known().loss(params),
            "features": lambda kind: known().features(kind),
            "_known": known,
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("samples", "class_counts"):
            return getattr(self._known(), name)
        raise AttributeError(name)


class LazyRuntime(ClientRuntime):
    """A client's side of an evaluation, with images that may never be needed."""

    def _client(self, client: int, round: int) -> Client:
        known = partial(super()._client, client, round)
        return LateClient(client, self.world.client_names[client], round, self.config.seed, known)

    def _train_locally(
        self,
        stages: Sequence[Stage],
        params: Mapping[int, Tensors],
        round: int,
        purpose: str = "",
        fitting: bool = False,
        private: bool = False,
    ) -> dict[int, TrainingResult | DivergenceError]:
        if any(stage.trainable and stage.epochs and stage.steps != 0 for stage in stages):
            return super()._train_locally(stages, params, round, purpose, fitting, private)
        return {client: TrainingResult(own, Progress(0, {}), None) for client, own in params.items()}
