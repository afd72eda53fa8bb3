"""A client whose training images are opened when a method asks for them, and not before.

Most methods predict from tensors alone, so most runs can be used where their images are not. Those that fit themselves to
a client's training images before a test, or choose by their loss, ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from fedprompt.backbones.vit import ViT
from fedprompt.engines.client import ClientRuntime
from fedprompt.engines.images import ImageBank, Images
from fedprompt.engines.local_training import Trained
from fedprompt.errors import DivergenceError
from fedprompt.method import Client, Progress, Stage
from fedprompt.roles import Tensors
from fedprompt.streams import stream


class LateBank(ImageBank):
    """A bank that is made when somebody asks for an image."""

    def __init__(self, backbone: ViT, make: Callable[[], ImageBank]) -> None:
        self._backbone, self._make = backbone, make

    @cached_property
    def _bank(self) -> ImageBank:
        return self._make()

    @property
    def used(self) -> bool:
        """Whether anybody asked."""
        return "_bank" in vars(self)

    @property
    def backbone(self) -> ViT:
        return self._backbone

    def images(self, client: int, part: str) -> Images:
        return self._bank.images(client, part)

    def __getattr__(self, name: str) -> Any:  # of what `ImageBank` would have set when it was made
        if name in ("tables", "_clients"):
            return getattr(self._bank, name)
        raise AttributeError(name)


class LateClient(Client):
    """A client that counts its images when a method wants to know."""

    def __init__(self, index: int, name: str, round: int, seed: int, known: Callable[[], Client]) -> None:
        told = {
            "index": index,
            "name": name,
            "round": round,
            "stream": lambda purpose: stream(seed, round, index, purpose),
            "loss": lambda params: known().loss(params),
            "features": lambda kind: known().features(kind),
            "_known": known,
        }
        for field, value in told.items():
            object.__setattr__(self, field, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("samples", "class_counts"):
            return getattr(self._known(), name)
        raise AttributeError(name)


class LateRuntime(ClientRuntime):
    """A client's side of an evaluation, with images that may never be needed."""

    def _client(self, client: int, round: int) -> Client:
        known = partial(super()._client, client, round)
        return LateClient(client, self.world.client_names[client], round, self.config.seed, known)

    def _trained(
        self,
        stages: Sequence[Stage],
        params: Mapping[int, Tensors],
        round: int,
        purpose: str = "",
        fitting: bool = False,
        private: bool = False,
    ) -> dict[int, Trained | DivergenceError]:
        if any(stage.trainable and stage.epochs and stage.steps != 0 for stage in stages):
            return super()._trained(stages, params, round, purpose, fitting, private)
        return {client: Trained(own, Progress(0, {}), None) for client, own in params.items()}
