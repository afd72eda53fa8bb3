"""The toy job as a plain PyTorch loop, with nothing around it: no checks, no streams, no file."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from job import BATCH, CLIENTS, COHORT, RATE, ROUNDS, SAMPLES, Watch, from_modules, network, read, serve, to_modules

job = read(sys.argv[1])
model = network()


def train(client: int) -> None:
    """One epoch, from the weights the model has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, labels = job.inputs[client], job.labels[client]
    for batch in torch.randperm(SAMPLES).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()


def run(watch: Watch) -> dict[str, float]:
    torch.manual_seed(0)
    shared = to_modules(job.start)
    for round in range(1 + ROUNDS):
        if round == 1:
            watch.start()
        total = {name: torch.zeros_like(value) for name, value in shared.items()}
        for client in torch.randperm(CLIENTS)[:COHORT].tolist():
            model.load_state_dict(shared)
            train(client)
            for name, value in model.state_dict().items():
                total[name] += value / COHORT
        shared = total
    watch.stop()
    return job.score(from_modules(shared))


serve(run)
