"""Loads the client that fedprompt exported to a folder, with transformers, safetensors and torch alone.

    from load_client import Client
    client = Client("exported")
    print(client.predict(["cat.jpg"]))

Or on the command line: python load_client.py cat.jpg ... This file is part of the export. fedprompt reads the folder's
data with its own copy and never runs the one in the folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor

BACKBONES = ("ViTModel", "DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel", "CLIPVisionModel")


class Client:
    """One client: a frozen backbone, its prompts, and a linear classifier."""

    def __init__(self, folder: str | Path = ".", backbone: str | Path | None = None) -> None:
        """`backbone` is the name or the folder of the backbone, for an export without it."""
        folder = Path(folder)
        self.card: dict[str, Any] = json.loads((folder / "client.json").read_text(encoding="utf-8"))
        self.classes: list[str] = self.card["classes"]
        self.tensors = load_file(folder / "client.safetensors")
        named = self.card["backbone"]
        if backbone is None and named["folder"] is None:
            raise ValueError(f"this export has no backbone: give backbone=, such as {named['name']!r}")
        if named["class"] not in BACKBONES:
            raise ValueError(f"the backbone must be one of {', '.join(BACKBONES)}, got {named['class']!r}")
        kind = getattr(transformers, named["class"])
        place = folder / "backbone" if backbone is None else backbone
        if backbone is None and not (folder / "backbone").is_dir():
            raise ValueError("the folder backbone of this export is missing")
        self.model = kind.from_pretrained(place, use_safetensors=True).eval()
        self._add_weights()
        self._add_prompts()

    def _add_weights(self) -> None:
        """Weights that the client's method changed (LoRA)."""
        for name, tensor in self.tensors.items():
            if name.startswith("added."):
                self.model.get_parameter(name.removeprefix("added.")).data += tensor

    def _add_prompts(self) -> None:
        """Tokens that join before a layer, behind the rows that stay."""
        layers = next(part for part in self.model.modules() if isinstance(part, torch.nn.ModuleList))
        for number, layer in enumerate(layers):
            if f"enter.{number}" in self.tensors:
                keep, enter = self.tensors[f"keep.{number}"], self.tensors[f"enter.{number}"]

                def insert(_: Any, inputs: Any, keep: Tensor = keep, enter: Tensor = enter) -> Any:
                    return torch.cat([inputs[0][:, keep], enter.expand(len(inputs[0]), -1, -1)], dim=1), *inputs[1:]

                layer.register_forward_pre_hook(insert)

    def pixels(self, images: Iterable[str | Path | Image.Image]) -> np.ndarray:
        """Files or images as squares (B, S, S, 3)."""
        opened = [each if isinstance(each, Image.Image) else Image.open(each) for each in images]
        prepare = ImageOps.fit if self.card["image"]["resize"] == "crop" else Image.Image.resize
        side = (self.card["image"]["size"],) * 2
        return np.stack([np.asarray(prepare(each.convert("RGB"), side, Image.Resampling.BICUBIC)) for each in opened])

    def logits(self, pixels: np.ndarray) -> Tensor:
        """(B, C) of pixels (B, S, S, 3)."""
        values = (pixels / 255 - self.card["image"]["mean"]) / self.card["image"]["std"]
        images = torch.tensor(values, dtype=torch.float32).permute(0, 3, 1, 2)
        with torch.no_grad():
            hidden = self.model(images, **self.card["backbone"]["call"]).last_hidden_state
            return F.linear(self._feature(hidden), self.tensors["classifier.weight"], self.tensors["classifier.bias"])

    def _feature(self, hidden: Tensor) -> Tensor:
        """What the classifier reads of the last hidden state; for a dual encoder, in the space of the texts."""
        found = self.tensors
        if "norm.weight" in found:
            norm = found["norm.weight"], found["norm.bias"]
            hidden = F.layer_norm(hidden, hidden.shape[-1:], *norm, self.card["norm_eps"])
        feature = given = torch.cat([hidden[:, rows].mean(1) for rows in self.card["read"]], dim=-1)
        if "projection.linear.weight" in found:
            feature = F.linear(given, found["projection.linear.weight"], found.get("projection.linear.bias"))
        if "projection.hidden.weight" in found:  # the bridges of mini and b16
            inner = F.gelu(F.linear(given, found["projection.hidden.weight"], found["projection.hidden.bias"]))
            feature = feature + F.linear(inner, found["projection.output.weight"], found["projection.output.bias"])
        return F.normalize(feature, dim=-1) if self.card["unit_length"] else feature

    def predict(self, images: Iterable[str | Path | Image.Image]) -> list[str]:
        """The most likely class of each image."""
        return [self.classes[number] for number in self.logits(self.pixels(images)).argmax(-1).tolist()]


if __name__ == "__main__":
    print(json.dumps(Client(Path(__file__).parent).predict(sys.argv[1:])))
