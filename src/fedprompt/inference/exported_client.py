"""A client from the folder of an export, ready to predict: it needs no run file.

Only data is read from the folder: JSON and safetensors. The script in it is for those without fedprompt and is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from fedprompt.config.complaints import complaints
from fedprompt.data.cache.pixel_store import resized
from fedprompt.errors import DataError, RunError, broken
from fedprompt.inference.load_client import Client
from fedprompt.inference.trained_client import Picture, Prediction, as_list, decoded, is_pixels
from fedprompt.io.bounded_read import read_json
from fedprompt.io.files import cache_directory
from fedprompt.random_streams import Stream

FORMAT = "fedprompt-export-1"
CARD = "client.json"
MOST_PIXELS = 4096  # of a side
BATCH = 64
Numbers = Annotated[list[float], Field(min_length=3, max_length=3)]


class ImageCard(BaseModel):
    """How images become squares."""

    size: Annotated[int, Field(ge=1, le=MOST_PIXELS)]
    resize: Literal["squash", "crop"]
    mean: Numbers
    std: Numbers


class BackboneCard(BaseModel):
    """Which model of `transformers` it is, and where."""

    model_config = ConfigDict(populate_by_name=True)
    kind: Annotated[str, Field(alias="class")]
    folder: Literal["backbone"] | None
    name: str
    call: dict[Literal["interpolate_pos_encoding"], bool]


class Card(BaseModel):
    """The part of `client.json` that is used to predict."""

    format: Literal["fedprompt-export-1"]
    client: str
    classes: Annotated[list[str], Field(min_length=1)]
    image: ImageCard
    backbone: BackboneCard
    read: Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]
    norm_eps: float
    unit_length: bool
    run: dict[str, Any]
    method: dict[str, Any]


@dataclass(frozen=True, eq=False)
class ExportedClient:
    """One client from its exported folder."""

    card: Card
    """What `client.json` says."""
    model: Client

    @classmethod
    def open(cls, folder: str | Path, backbone: str | Path | None = None) -> ExportedClient:
        """The client of an exported folder. One that was exported without its backbone needs its name or folder."""
        folder = Path(folder)
        card = read_card(folder)
        if backbone is None and card.backbone.folder is None:
            raise RunError(broken("backbone", f"be given: {str(folder)!r} was exported without it", None))
        try:
            return cls(card, Client(folder, backbone))
        except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
            raise RunError(f"exported client {str(folder)!r} cannot be read: {error}") from error

    @property
    def name(self) -> str:
        return self.card.client

    @property
    def item(self) -> str:
        """What it classifies."""
        return "image"

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.card.classes)

    @property
    def cache(self) -> Path:
        """The folder for caches."""
        return cache_directory()

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return BATCH

    def stream(self) -> Stream | None:
        """An export has no random draws."""
        return None

    def described(self) -> dict[str, Any]:
        """Where predictions come from, for files of them."""
        run = self.card.run
        said = {"run": run.get("name"), "client": self.name, "round": run.get("round")}
        return {**said, "method": self.card.method.get("label"), "classes": list(self.class_names)}

    def pixels(self, pictures: Sequence[Picture]) -> np.ndarray:
        """Pictures as pixels (B, S, S, 3) uint8, resized as in the run."""
        image = self.card.image
        return np.stack([resized(decoded(picture), image.size, image.resize) for picture in pictures])

    def predict(self, pictures: Picture | Sequence[Picture], generator: Stream | None = None) -> Prediction:
        """Predictions for one picture or several, or for pixels (B, S, S, 3), as `TrainedClient.predict` gives them."""
        pixels = pictures if is_pixels(pictures) else self.pixels(as_list(pictures))
        if not len(pixels):
            raise DataError(broken("pictures", "hold at least one image", []))
        parts = [pixels[start : start + BATCH] for start in range(0, len(pixels), BATCH)]
        try:
            logits = torch.cat([self.model.logits(part) for part in parts])
        except (KeyError, IndexError, RuntimeError, ValueError, TypeError) as error:
            raise RunError(f"exported client {self.name!r} must hold tensors that fit together: {error}") from error
        return Prediction(logits.double().softmax(-1)[None], self.class_names)


def is_export(folder: Path) -> bool:
    """Whether a folder is an export rather than a run."""
    return (folder / CARD).is_file() and not (folder / "run.db").exists()


def read_card(folder: Path) -> Card:
    """The checked content of `client.json`."""
    try:
        return Card.model_validate(read_json(folder / CARD), strict=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(broken("exported client", f"be a folder with {CARD}", str(folder))) from error
    except ValidationError as error:
        raise RunError(f"{CARD} of {str(folder)!r}: {complaints(error, '')}") from error
    except (OSError, ValueError) as error:
        raise RunError(f"exported client {str(folder)!r} cannot be read: {error}") from error
