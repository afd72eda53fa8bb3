"""The model of one client after a run, ready to predict: three lines from a run directory to probabilities.

from fedprompt.inference.client import TrainedClient
client = TrainedClient.open("runs/demo", "client_0")
print(client.probabilities(["cat.jpg"]))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.client.step import forward, make_batch
from fedprompt.config import Config
from fedprompt.core.method import Batch, Method, Seen, World
from fedprompt.data.cache.pixel_store import resized
from fedprompt.data.sources.base import Source, decode, to_rgb
from fedprompt.errors import DataError, DivergenceError, broken
from fedprompt.features.image_bank import Images
from fedprompt.inference.in_memory_images import as_images
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.metrics.scoring import entropy
from fedprompt.random_streams import Stream, stream
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

Picture = str | Path | Image.Image | np.ndarray  # a file, a decoded image, or an array (H, W, 3) of uint8


@dataclass(frozen=True)
class Prediction:
    """What a client says of B images."""

    draws: Tensor
    """(V, B, C) in float64: class probabilities of every draw; V is 1 for prompts that are no random variables."""

    @property
    def probabilities(self) -> Tensor:
        """(B, C): the mean over the draws, which is what counts as the prediction."""
        return self.draws.mean(0)

    @property
    def entropy(self) -> Tensor:
        """(B,) in nats: how undecided the prediction is, for whatever reason."""
        return entropy(self.probabilities)

    @property
    def mutual_information(self) -> Tensor | None:
        """(B,) in nats: how much the draws disagree, H(mean) - mean H; None where there is one draw only."""
        if len(self.draws) == 1:
            return None
        return (self.entropy - entropy(self.draws).mean(0)).clamp_min(0)


@dataclass(frozen=True, eq=False)
class TrainedClient:
    """One client of a run with the parameters it predicts with."""

    opened: LoadedRun
    """The run: server, backbone, settings."""
    world: World
    """As this client knows it; that of a newcomer has one client more than the run."""
    index: int
    """Its number."""
    params: Tensors
    """What its method predicts with, by name; on the device of the backbone."""

    @classmethod
    def open(
        cls,
        run: str | Path | Run | LoadedRun,
        client: str | int,
        *,
        weights: str | Path | None = None,
        device: str | None = None,
        state: str | Path | None = None,
        labelled: Source | None = None,
        data: str | Path | None = None,
        trust_config: bool = False,
    ) -> TrainedClient:
        """The client of this name or number as the last evaluation of the run saw it, whether it was tested then or not.

        Needs `run.db` and the weights of the backbone. A method that fits itself to a client's training images before it
        predicts also needs these: where the run found them, or `labelled` ones in their place. `state` is the directory
        of a site's node, for runs over sites, which keep what is their own to themselves. `data` and `trust_config`
        are those of `LoadedRun.open`.
        """
        if not isinstance(run, LoadedRun):
            run = LoadedRun.open(run, weights, device, data=data, trust_config=trust_config)
        opened = run
        index = opened.number(client)
        params = opened.fitted(index, opened.bank(labelled), opened.states(state))
        return cls(opened, opened.world, index, params)

    @property
    def name(self) -> str:
        return self.world.client_names[self.index]

    @property
    def config(self) -> Config:
        return self.opened.config

    @property
    def method(self) -> Method:
        return self.opened.method

    @property
    def backbone(self) -> ViT:
        """Frozen, and the very one the run was trained with."""
        return self.opened.backbone

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.world.class_names

    @property
    def round(self) -> int:
        """The round of the server's tensors."""
        return self.opened.round

    @property
    def batch_size(self) -> int:
        """Images that are predicted at once, as in an evaluation."""
        return self.config.federation.evaluation_batch

    def probabilities(self, pictures: np.ndarray | Sequence[Picture]) -> Tensor:
        """Class probabilities (B, C) of some images."""
        return self.predict(pictures).probabilities

    def predict(self, pictures: np.ndarray | Sequence[Picture], generator: Stream | None = None) -> Prediction:
        """What the client says of images: pixels (B, S, S, 3) of the backbone's size, or pictures of any size.

        Random draws of a Bayesian prompt come from `generator`; a new one of `stream()` unless given. The client's test
        images in their order give the very numbers of the run's evaluation.
        """
        pixels = pictures if isinstance(pictures, np.ndarray) else self.pixels(pictures)
        generator = generator or self.stream()
        draws = []
        with torch.no_grad():
            for start in range(0, len(pixels), self.batch_size):
                images = self.images(pixels[start : start + self.batch_size])
                batch, noise = self.batch(images), self.noise(len(images), generator)
                seen = self.forward(images, batch, noise)
                draws.append(self.method.predict(self.world, self.params, seen, batch, noise))
        if not draws:
            raise DataError(broken("pictures", "hold at least one image", []))
        found = torch.cat(draws, dim=1).to("cpu", torch.float64)
        if not found.isfinite().all():
            raise DivergenceError(f"predictions of client {self.name!r} must be finite, got NaN or infinity")
        return Prediction(found)

    def pixels(self, pictures: Iterable[Picture]) -> np.ndarray:
        """Pictures as pixels (B, S, S, 3) uint8, resized as in the run."""
        size, resize = self.backbone.shape.image_size, self.config.data.resize
        found = [resized(_decoded(picture), size, resize) for picture in pictures]
        return np.stack(found) if found else np.empty((0, size, size, 3), dtype=np.uint8)

    def images(self, pixels: np.ndarray) -> Images:
        """Pixels as the step functions of `client.step` want them: features of any name and tokens of any block."""
        return as_images(pixels, self.backbone)

    def batch(self, images: Images) -> Batch:
        """All of some images as one batch, with the un-prompted features the method needs."""
        return make_batch(self.method, images, torch.arange(len(images)), training=False)

    def forward(self, images: Images, batch: Batch, noise: Tensors) -> Seen:
        """What the frozen backbone returns of the images with this client's prompts in it."""
        return forward(self.method, self.world, self.params, images, torch.arange(len(images)), batch, noise)

    def noise(self, size: int, generator: Stream | None = None) -> Tensors:
        """The random draws of a prediction of so many images; empty for methods without."""
        drawn = self.method.noise(self.world, size, False, generator or self.stream())
        return {name: tensor.to(self.world.device) for name, tensor in drawn.items()}

    def stream(self) -> Stream:
        """The random draws of an evaluation of this client in the last round, from their beginning."""
        return stream(self.config.seed, self.round, self.index, "evaluation")


def _decoded(picture: Picture) -> Image.Image:
    if isinstance(picture, Image.Image):
        return to_rgb(picture)
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            rule = "be uint8 of shape (height, width, 3)"
            raise DataError(broken("picture", rule, f"{picture.dtype} of {picture.shape}"))
        return Image.fromarray(picture)
    return decode(Path(picture), str(picture))
