"""The model of one client after a run, ready to predict: three lines from a run directory to probabilities.

from fedprompt import TrainedClient
client = TrainedClient.open("runs/demo", "client_0")
print(client.predict("cat.jpg").labels)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedprompt.backbones.sentence_encoder import SentenceEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.client.step import forward, make_batch
from fedprompt.config import Config
from fedprompt.core.method import Batch, Method, Seen, World
from fedprompt.data.cache.pixel_store import resized, seen_part
from fedprompt.data.sources.base import Source, decode, to_rgb
from fedprompt.errors import DataError, DivergenceError, broken
from fedprompt.features.image_bank import Images
from fedprompt.inference.in_memory_images import as_images
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.metrics.scoring import entropy
from fedprompt.random_streams import Stream, stream
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

if TYPE_CHECKING:
    from fedprompt.inference.exported_client import ExportedClient

Picture = str | Path | Image.Image | np.ndarray  # a file, a decoded image, or an array (H, W, 3) of uint8


@dataclass(frozen=True)
class Prediction:
    """Predictions of a client for B images."""

    draws: Tensor
    """(V, B, C) in float64: class probabilities of every draw; V is 1 for prompts that are not random."""
    class_names: tuple[str, ...] = ()
    """The C classes."""

    @property
    def probabilities(self) -> Tensor:
        """(B, C): the mean over the draws, which is the prediction."""
        return self.draws.mean(0)

    @property
    def labels(self) -> list[str]:
        """The most likely class of each image."""
        return [self.class_names[number] for number in self.probabilities.argmax(-1).tolist()]

    @property
    def entropy(self) -> Tensor:
        """(B,) in nats: the total uncertainty of the prediction."""
        return entropy(self.probabilities)

    @property
    def mutual_information(self) -> Tensor | None:
        """(B,) in nats: how much the draws disagree, H(mean) - mean H; None if there is only one draw."""
        if len(self.draws) == 1:
            return None
        return (self.entropy - entropy(self.draws).mean(0)).clamp_min(0)


@dataclass(frozen=True, eq=False)
class TrainedClient:
    """One client of a run with the parameters it predicts with."""

    opened: LoadedRun
    """The run: server, backbone, settings."""
    world: World
    """The world of this client; that of a newcomer has one client more than the run."""
    index: int
    """Its number."""
    params: Tensors
    """The tensors its method predicts with, by name; on the device of the backbone."""

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
        """The client of this name or number as in the last evaluation of the run, even if it was not tested then.

        Needs `run.db` and the weights of the backbone. A method that fits itself to a client's training images before it
        predicts also needs these: at their path in the run, or `labelled` ones instead. `state` is the directory of a site's node,
        for runs over sites, which do not send their private tensors. For `data` and `trust_config` see
        `LoadedRun.open`.
        """
        if not isinstance(run, LoadedRun):
            run = LoadedRun.open(run, weights, device, data=data, trust_config=trust_config)
        opened = run
        index = opened.number(client)
        params = opened.fitted(index, opened.bank(labelled), opened.states(state))
        return cls(opened, opened.world, index, params)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        include_local: bool = False,
        with_backbone: bool = True,
        approximate: bool = False,
    ) -> dict[str, Any]:
        """Write the client to a new folder that works without fedprompt, and return its card; see docs/export.md.

        What never left the client, such as its own head, is written only with `include_local`; without that, a client
        that predicts with it is refused.
        """
        from fedprompt.inference import hub

        return hub.save_pretrained(self, folder, include_local, with_backbone, approximate)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        include_local: bool = False,
        with_backbone: bool = True,
        approximate: bool = False,
        private: bool = True,
        token: str | None = None,
    ) -> str:
        """Upload the same files to a repository of the Hugging Face hub, a private one unless stated otherwise."""
        from fedprompt.inference import hub

        options = {"include_local": include_local, "with_backbone": with_backbone, "approximate": approximate}
        return hub.push_to_hub(self, repo_id, private, token, **options)

    @staticmethod
    def from_pretrained(
        name_or_folder: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        backbone: str | Path | None = None,
    ) -> ExportedClient:
        """A client from an exported folder or from the hub, to predict with; `backbone` is needed where it was left out.

        Only data is read, no code.
        """
        from fedprompt.inference import hub

        return hub.from_pretrained(name_or_folder, revision, token, backbone)

    def described(self) -> dict[str, Any]:
        """Where predictions come from, for files of them."""
        said = {"run": self.opened.run.name, "client": self.name, "round": self.round}
        return {**said, "method": self.config.label, "classes": list(self.class_names)}

    @property
    def item(self) -> str:
        """What it classifies: "image" or "text"."""
        return "text" if isinstance(self.backbone, SentenceEncoder) else "image"

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
        """The frozen backbone that the run was trained with."""
        return self.opened.backbone

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.world.class_names

    @property
    def round(self) -> int:
        """The round of the server's tensors."""
        return self.opened.round

    @property
    def cache(self) -> Path:
        """The folder for caches."""
        return self.opened.factory.cache

    @property
    def batch_size(self) -> int:
        """Images per batch, as in an evaluation."""
        return self.config.federation.evaluation_batch

    def probabilities(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """Class probabilities (B, C) of some images."""
        return self.predict(pictures).probabilities

    def predict(self, pictures: Picture | Sequence[Picture], generator: Stream | None = None) -> Prediction:
        """The client's predictions for one picture or several (files, images, arrays), or for pixels (B, S, S, 3) of the
        backbone's size. If the backbone reads sentences: for one text or several.

        Random draws of a Bayesian prompt come from `generator`; a new one of `stream()` unless given. The client's test
        images in their order give exactly the numbers of the run's evaluation, unless that had `test_classes: own`.
        """
        pixels = pictures if is_pixels(pictures) else self.pixels(as_list(pictures))
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
        return Prediction(found, self.class_names)

    def pixels(self, pictures: Iterable[Picture]) -> np.ndarray:
        """Pictures as pixels (B, S, S, 3) uint8, resized as in the run; sentences as token numbers (B, T)."""
        if isinstance(self.backbone, SentenceEncoder):
            rows = [self.backbone.ids(text(picture)) for picture in pictures]
            return np.stack(rows) if rows else np.empty((0, self.backbone.shape.max_tokens), dtype=np.int32)
        size, resize = self.backbone.shape.image_size, self.config.data.resize
        found = [resized(decoded(picture), size, resize) for picture in pictures]
        return np.stack(found) if found else np.empty((0, size, size, 3), dtype=np.uint8)

    def own_pixels(self, picture: Picture, most: int) -> np.ndarray:
        """The part of a picture that the backbone sees, (H, W, 3) uint8 at its own resolution or `most` pixels."""
        image = decoded(picture)
        left, top, right, bottom = seen_part(image, self.config.data.resize)
        whole = image.crop((round(left), round(top), round(right), round(bottom))).convert("RGB")
        whole.thumbnail((most, most))
        return np.asarray(whole, dtype=np.uint8)

    def images(self, pixels: np.ndarray) -> Images:
        """Pixels in the form that `client.step` needs: features of any name and tokens of any block."""
        return as_images(pixels, self.backbone)

    def batch(self, images: Images) -> Batch:
        """All images as one batch, with the features without prompts that the method needs."""
        return make_batch(self.method, images, torch.arange(len(images)), training=False)

    def forward(self, images: Images, batch: Batch, noise: Tensors) -> Seen:
        """The output of the frozen backbone for the images, with this client's prompts."""
        return forward(self.method, self.world, self.params, images, torch.arange(len(images)), batch, noise)

    def noise(self, size: int, generator: Stream | None = None) -> Tensors:
        """The random draws for the prediction of `size` images; empty for methods without randomness."""
        drawn = self.method.noise(self.world, size, False, generator or self.stream())
        return {name: tensor.to(self.world.device) for name, tensor in drawn.items()}

    def stream(self) -> Stream:
        """A new generator with the random draws of this client's evaluation in the last round."""
        return stream(self.config.seed, self.round, self.index, "evaluation")


def is_pixels(pictures: Picture | Sequence[Picture]) -> TypeGuard[np.ndarray]:
    """Whether these are several images as one array, or several sentences as token numbers."""
    if not isinstance(pictures, np.ndarray):
        return False
    return pictures.ndim == 4 or (pictures.ndim == 2 and pictures.dtype == np.int32)


def as_list(pictures: Picture | Sequence[Picture]) -> Sequence[Picture]:
    return [pictures] if isinstance(pictures, str | Path | Image.Image | np.ndarray) else pictures


def text(sentence: object) -> str:
    """A sentence to classify."""
    if not isinstance(sentence, str) or not sentence.strip():
        found = sentence if isinstance(sentence, str) else type(sentence).__name__
        raise DataError(broken("sentence", "be a text: the backbone reads sentences", found))
    return sentence


def decoded(picture: Picture) -> Image.Image:
    if isinstance(picture, Image.Image):
        return to_rgb(picture)
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            rule = "be uint8 of shape (height, width, 3)"
            raise DataError(broken("picture", rule, f"{picture.dtype} of {picture.shape}"))
        return Image.fromarray(picture)
    return decode(Path(picture), str(picture))
