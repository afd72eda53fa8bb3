"""The toy job in fedprompt: the real federation, engine, guard and run file; only the images are numbers from a file."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from job import BATCH, CLASSES, CLIENTS, COHORT, INPUTS, RATE, ROUNDS, SAMPLES, Job, Watch, read, serve
from torch import Tensor

from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.vit import ViT
from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import Config, parse
from fedprompt.core import wire
from fedprompt.core.method import Batch, Method, Seen, World
from fedprompt.core.roles import Roles
from fedprompt.engines.in_process import InProcess
from fedprompt.features.feature_tables import LoadedRows
from fedprompt.features.image_bank import ImageBank
from fedprompt.federation.loop import Federation, Observer
from fedprompt.random_streams import SERVER, Stream, stream
from fedprompt.runs.store import RoundRecord, RunStore
from fedprompt.tensors import Tensors


@dataclass(frozen=True)
class Network(Method):
    """The MLP, averaged; it reads 32 numbers where other methods read the CLS row."""

    start: Job

    def init(self, world: World, generator: Stream) -> Roles:
        return Roles(shared=self.start.start)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return F.linear(F.relu(F.linear(seen.cls, params["w1"], params["b1"])), params["w2"], params["b2"])


@dataclass(frozen=True)
class Samples:
    """One client's samples, where a run has its images."""

    bank: Bank
    indices: np.ndarray
    labels: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def domains(self) -> np.ndarray:
        return np.zeros(len(self), dtype=np.int64)

    def features(self, name: str, positions: Tensor) -> Tensor:
        return self.bank.features(name, torch.from_numpy(self.indices)[positions])


class Bank:
    """All samples, where a run has its image bank. Every client is tested on what it trains on."""

    def __init__(self, job: Job) -> None:
        self.rows = job.inputs.flatten(0, 1)
        numbers = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
        self.clients = [Samples(self, own, labels) for own, labels in zip(numbers, job.labels, strict=True)]

    @cached_property
    def backbone(self) -> ViT:
        """Nothing of the job goes through it."""
        return random_vit()

    def images(self, client: int, part: str) -> Samples:
        return self.clients[client]

    def features(self, name: str, indices: Tensor) -> Tensor:
        return self.rows.index_select(0, indices)  # as the engine's own tables do

    def load(self, indices: Tensor, names: Sequence[str], views: Tensor | None = None) -> LoadedRows:
        return LoadedRows(lambda names: dict.fromkeys(names, self.features("", indices)), names)

    def prefetch(self, *wanted: object) -> None:
        """There is nothing to decode."""


class Rounds(Observer):
    """Keeps the watch on all rounds but the first, as other sides do, and the last, the only one that is evaluated."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def committed(self, record: RoundRecord) -> None:
        if record.round == 1:
            self._watch.start()
        if record.round == 1 + ROUNDS:
            self._watch.stop()


def settings(directory: str) -> Config:
    return parse(
        {
            "method": {"name": "head_tune"},  # a name is asked for; `Network` is what runs
            "train": {
                "batch_size": BATCH,
                "optimizer": "sgd",
                "lr": RATE,
                "momentum": 0.0,
                "schedule": "constant",
                "clip_norm": None,
            },
            "federation": {
                "rounds": ROUNDS + 2,
                "fraction": COHORT / CLIENTS,
                "evaluate_every": ROUNDS + 2,
                "evaluate_last": 1,
            },
            "output": {"directory": directory},
        }
    )


job = read(sys.argv[1])
bank = cast(ImageBank, Bank(job))


def run(watch: Watch) -> dict[str, float]:
    method = Network(job)
    classes = tuple(f"class {number}" for number in range(CLASSES))
    clients = tuple(f"client {number}" for number in range(CLIENTS))
    world = World(INPUTS, 1, 1, 1, classes, clients)
    world = replace(world, roles=method.init(world, stream(0, 0, SERVER, "init")))
    with tempfile.TemporaryDirectory(prefix="fedprompt-toy-") as directory:
        config = settings(directory)
        store = RunStore.create(directory, {})
        try:
            runtime = ClientRuntime(config, world, method, bank, ClientStates(store.client_state), ["only"])
            Federation(config, world, method, InProcess(runtime), store, Rounds(watch)).run()
            state = store.server_state()
        finally:
            store.close()
    assert state is not None
    return job.score(wire.decode(state[1]))


serve(run)
