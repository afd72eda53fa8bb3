"""The arithmetic of the toy job alone: the steps of a cohort under one `vmap`, with batches at hand and nothing else.

What our engine needs beyond this is the cost of the framework.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from job import BATCH, COHORT, RATE, ROUNDS, Watch, Weights, read, serve
from torch import Tensor

job = read(sys.argv[1])
batches = list(zip(job.inputs[:COHORT].split(BATCH, dim=1), job.labels[:COHORT].split(BATCH, dim=1), strict=True))


def loss(weights: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
    hidden = F.relu(F.linear(inputs, weights["w1"], weights["b1"]))
    return F.cross_entropy(F.linear(hidden, weights["w2"], weights["b2"]), labels)


def train(shared: Weights) -> Weights:
    """One epoch of a cohort, and the mean of what its clients have learned."""
    stacked = {name: value.expand(COHORT, *value.shape) for name, value in shared.items()}
    for inputs, labels in batches:
        leaves = {name: value.detach().requires_grad_() for name, value in stacked.items()}
        losses = torch.func.vmap(loss)(leaves, inputs, labels)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        stacked = {name: leaf.detach() - RATE * g for (name, leaf), g in zip(leaves.items(), gradients, strict=True)}
    return {name: value.mean(0) for name, value in stacked.items()}


def run(watch: Watch) -> dict[str, float]:
    shared = train(job.start)
    watch.start()
    for _ in range(ROUNDS):
        shared = train(shared)
    watch.stop()
    return {}


serve(run)
