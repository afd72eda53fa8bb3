"""The toy job that every side runs: its data, what its result is judged by, and how a side is asked to run it.

100 clients with 128 samples of 32 numbers in 10 classes, 10 clients a round, one epoch in batches of 32, plain SGD, an MLP
32-64-10 whose weights are averaged. This module needs numpy and torch only: it is read in environments without fedprompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS, COHORT, ROUNDS = 100, 10, 50
SAMPLES, BATCH, RATE = 128, 32, 0.1
INPUTS, HIDDEN, CLASSES = 32, 64, 10
PLACES = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}  # of the weights in `network()`

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """What all sides start from."""

    inputs: Tensor  # (clients, samples, inputs)
    labels: Tensor  # (clients, samples)
    start: Weights

    def score(self, weights: Weights) -> dict[str, float]:
        """How well some weights do on the samples of all clients."""
        hidden = F.relu(F.linear(self.inputs.flatten(0, 1), weights["w1"], weights["b1"]))
        logits, labels = F.linear(hidden, weights["w2"], weights["b2"]), self.labels.flatten()
        right = (logits.argmax(-1) == labels).float().mean()
        return {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(right)}


def write(path: Path) -> None:
    """The samples, which a network of the same shape has labelled, and the weights to start from."""
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((CLIENTS, SAMPLES, INPUTS), dtype=np.float32)
    hidden = np.maximum(inputs @ draw.standard_normal((INPUTS, HIDDEN), dtype=np.float32), 0)
    labels = (hidden @ draw.standard_normal((HIDDEN, CLASSES), dtype=np.float32)).argmax(-1)
    start = {
        "w1": draw.uniform(-1, 1, (HIDDEN, INPUTS)) / INPUTS**0.5,
        "b1": np.zeros(HIDDEN),
        "w2": draw.uniform(-1, 1, (CLASSES, HIDDEN)) / HIDDEN**0.5,
        "b2": np.zeros(CLASSES),
    }
    np.savez(path, inputs=inputs, labels=labels, **{name: value.astype(np.float32) for name, value in start.items()})


@cache
def read(path: str) -> Job:
    """The job in a file, read once by every process."""
    with np.load(path, allow_pickle=False) as held:
        tensors = {name: torch.from_numpy(held[name]) for name in held.files}
    return Job(tensors.pop("inputs"), tensors.pop("labels"), tensors)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def to_modules(weights: Weights) -> Weights:
    """Weights under the names of `network()`."""
    return {PLACES[name]: value for name, value in weights.items()}


def from_modules(state: Weights) -> Weights:
    return {name: state[place].detach().clone() for name, place in PLACES.items()}


class Watch:
    """Started and stopped by a side around its rounds: wall seconds, and CPU seconds of this process."""

    def start(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall, self.cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]


Side = Callable[[Watch], dict[str, float]]  # runs the job once, with the rounds on the watch, and tells how well it did


def serve(side: Side) -> None:
    """Run the job whenever a line comes in, and answer with a line of JSON. What else is printed goes to stderr."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for _ in sys.stdin:
        watch = Watch()
        figures = side(watch)
        print(json.dumps({"wall": watch.wall, "cpu": watch.cpu, **figures}), file=answers, flush=True)
