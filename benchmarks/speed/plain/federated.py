"""What all plain programs share: images decoded once, the frozen model, and federated averaging as a for-loop.

These programs are what a good engineer would write with `transformers` for one method and one job: no checks, no run
file, no cache of features. They read nothing of fedprompt but the files of the job, which `whole_jobs.py` writes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor, Tensor], Tensor]  # of parameters, images and labels
Predict = Callable[[Params, Tensor], Tensor]  # probabilities (B, C)


@dataclass
class Part:
    """Images of one client, normalised, and their labels."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int, shuffled: bool) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.labels)) if shuffled else torch.arange(len(self.labels))
        for batch in order.split(size):
            yield self.images[batch], self.labels[batch]


class Job:
    """The files of a job."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = folder
        self.settings: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.classes: int = self.settings["classes"]
        tensors = load_file(folder / "start.safetensors")
        self.shared = {name: tensor for name, tensor in tensors.items() if name in self.settings["shared"]}
        self.local = {name: tensor for name, tensor in tensors.items() if name in self.settings["local"]}
        self.model = transformers.AutoModel.from_pretrained(folder / "model").eval().requires_grad_(False)
        self.clients = [
            {part: self._decoded(own[part]) for part in ("train", "test")} for own in self.settings["clients"]
        ]

    def _decoded(self, files: list[tuple[str, int]]) -> Part:
        side, pixels = self.settings["pixels"], []
        for name, _ in files:
            image = Image.open(self.folder / name).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
            pixels.append(np.asarray(image))
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(self.settings[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
        return Part((images - mean) / std, torch.tensor([label for _, label in files]))

    def run(self, loss: Loss, predict: Predict) -> None:
        """All rounds, each with an evaluation of every client; the last line printed is the mean accuracy over clients."""
        settings, shared = self.settings, self.shared
        kept = [self.local for _ in self.clients]
        for number in range(settings["rounds"]):
            fall = 0.5 * (1 + math.cos(math.pi * number / settings["rounds"]))
            uploads, sizes = [], []
            for client, parts in enumerate(self.clients):
                params = {n: t.clone().requires_grad_() for n, t in {**shared, **kept[client]}.items()}
                groups = [{"params": [tensor], "lr": fall * settings["rates"][n]} for n, tensor in params.items()]
                optimizer = torch.optim.Adam(groups)
                for _ in range(settings["epochs"]):
                    for images, labels in parts["train"].batches(settings["batch_size"], shuffled=True):
                        optimizer.zero_grad()
                        loss(params, images, labels).backward()
                        optimizer.step()
                uploads.append({name: params[name].detach() for name in shared})
                kept[client] = {name: params[name].detach() for name in self.local}
                sizes.append(len(parts["train"].labels))
            total = sum(sizes)
            shared = {
                name: sum(size / total * each[name] for size, each in zip(sizes, uploads, strict=True))  # type: ignore[misc]
                for name in shared
            }
            accuracies = [
                self._accuracy(predict, {**shared, **own}, parts["test"])
                for own, parts in zip(kept, self.clients, strict=True)
            ]
            average = sum(accuracies) / len(accuracies)
            print(f"round {number + 1}: {100 * average:.2f} %", file=sys.stderr)
        print(json.dumps({"average": average}))

    @torch.no_grad()
    def _accuracy(self, predict: Predict, params: Params, part: Part) -> float:
        right = 0
        for images, labels in part.batches(self.settings["evaluation_batch"], shuffled=False):
            right += int((predict(params, images).argmax(-1) == labels).sum())
        return right / len(part.labels)


def job() -> Job:
    """The job in the folder that the command line names."""
    return Job(Path(sys.argv[1]))


def prompted_cls(model: Any, images: Tensor, prompts: Callable[[int], Tensor]) -> Tensor:
    """The CLS row (B, d) of DINOv2 with tokens (B, n, d) or (n, d) that are new before every block."""
    x = model.embeddings(images)
    patches = x.shape[1] - 1
    for number, layer in enumerate(model.encoder.layer):
        tokens = prompts(number)
        x = torch.cat([x[:, :1], tokens.expand(len(x), -1, -1), x[:, -patches:]], dim=1)
        x = layer(x)
        x = x[0] if isinstance(x, tuple) else x
    row: Tensor = model.layernorm(x)[:, 0]
    return row
