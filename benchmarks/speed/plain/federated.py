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


@dataclass
class Part:
    """Images of one client, normalised, and their labels."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int, shuffled: bool) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.labels)) if shuffled else torch.arange(len(self.labels))
        for batch in order.split(size):
            yield self.images[batch], self.labels[batch]


def nothing(client: int, params: Params) -> Params:
    """What most methods compute before a participation or a test."""
    return {}


def stays(client: int, params: Params) -> Params:
    """What most methods do with the local tensors after training."""
    return params


@dataclass(frozen=True)
class Program:
    """A method, as functions of parameters."""

    loss: Callable[[Params, Tensor, Tensor], Tensor]
    """Of parameters, images and labels."""
    predict: Callable[[Params, Tensor], Tensor]
    """Probabilities (B, C)."""
    before_training: Callable[[int, Params], Params] = nothing
    """Further tensors of a client that are not trained."""
    before_test: Callable[[int, Params], Params] = nothing
    kept: Callable[[int, Params], Params] = stays
    """The local tensors after a participation."""
    after_round: Callable[[list[Params]], None] = lambda uploads: None
    """Given what all clients have uploaded."""


class Job:
    """The files of a job."""

    def __init__(self, folder: Path, images: bool = True) -> None:
        """Without `images` there is only what a server needs."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = folder
        self.losses: list[tuple[float, int]] = []  # of the steps of a round, with their images
        self.settings: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.classes: int = self.settings["classes"]
        tensors = load_file(folder / "start.safetensors")
        self.shared = {name: tensor for name, tensor in tensors.items() if name in self.settings["shared"]}
        self.local = {name: tensor for name, tensor in tensors.items() if name in self.settings["local"]}
        if not images:
            return
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

    def run(self, program: Program) -> None:
        """All rounds, each with an evaluation of every client; the last line printed is the mean accuracy over clients."""
        settings, shared = self.settings, self.shared
        kept = [self.local for _ in self.clients]
        for number in range(settings["rounds"]):
            uploads, sizes, self.losses = [], [], []
            for client, parts in enumerate(self.clients):
                upload, kept[client] = self.trained(program, client, number, shared, kept[client])
                uploads.append(upload)
                sizes.append(len(parts["train"].labels))
            total = sum(sizes)
            shared = {
                name: sum(size / total * each[name] for size, each in zip(sizes, uploads, strict=True))  # type: ignore[misc]
                for name in shared
            }
            program.after_round(uploads)
            accuracies = [self.accuracy(program, client, {**shared, **own}) for client, own in enumerate(kept)]
            average = sum(accuracies) / len(accuracies)
            print(f"round {number + 1}: {100 * average:.2f} %", file=sys.stderr)
        trained = sum(size for _, size in self.losses)
        print(json.dumps({"average": average, "loss": sum(loss * size for loss, size in self.losses) / trained}))

    def trained(
        self, program: Program, client: int, number: int, shared: Params, local: Params
    ) -> tuple[Params, Params]:
        """What a client uploads and what it keeps after its part of a round."""
        settings = self.settings
        fall = 0.5 * (1 + math.cos(math.pi * number / settings["rounds"]))
        params = {name: tensor.clone() for name, tensor in {**shared, **local}.items()}
        params |= program.before_training(client, params)
        learned = [name for name in settings["trained"] if name in params]
        groups = [{"params": [params[name].requires_grad_()], "lr": fall * settings["rates"][name]} for name in learned]
        optimizer = torch.optim.Adam(groups)
        for _ in range(settings["epochs"]):
            for images, labels in self.clients[client]["train"].batches(settings["batch_size"], shuffled=True):
                optimizer.zero_grad()
                loss = program.loss(params, images, labels)
                loss.backward()
                self.losses.append((loss.item(), len(labels)))
                optimizer.step()
        params = {name: tensor.detach() for name, tensor in params.items()}
        return {name: params[name] for name in shared}, program.kept(client, {name: params[name] for name in local})

    @torch.no_grad()
    def accuracy(self, program: Program, client: int, params: Params) -> float:
        """The share of its test images that a client gets right."""
        params = {**params, **program.before_test(client, params)}
        part, right = self.clients[client]["test"], 0
        for images, labels in part.batches(self.settings["evaluation_batch"], shuffled=False):
            right += int((program.predict(params, images).argmax(-1) == labels).sum())
        return right / len(part.labels)


def job() -> Job:
    """The job in the folder that the command line names."""
    return Job(Path(sys.argv[1]))


Between = Callable[[int, Tensor], Tensor]


def prompted_rows(model: Any, images: Tensor, prompts: Between) -> Tensor:
    """The rows (B, 1 + n + M, d) of DINOv2 after the last norm: CLS, prompts, patches.

    `prompts` gives what stands between CLS and patches in a block, (B, n, d) or (n, d), of the block's number and of what
    came out of the block before, (B, n, d).
    """
    x = model.embeddings(images)
    patches = x.shape[1] - 1
    for number, layer in enumerate(model.encoder.layer):
        before = x[:, 1:-patches]
        tokens = prompts(number, before)
        if tokens is not before:
            x = torch.cat([x[:, :1], tokens.expand(len(x), -1, -1), x[:, -patches:]], dim=1)
        x = layer(x)
        x = x[0] if isinstance(x, tuple) else x
    rows: Tensor = model.layernorm(x)
    return rows


def prompted_cls(model: Any, images: Tensor, prompts: Between) -> Tensor:
    """The CLS row (B, d) of it."""
    return prompted_rows(model, images, prompts)[:, 0]
