"""PEP-FedPT with `transformers`: shared prompts, and a mixture of class prompts for every image before the last blocks.

The maths is in the docstring of `fedprompt.methods.pep_fedpt`. The pass without prompts, whose CLS row is the query, is done
for every batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from federated import Params, Program, job, prompted_cls
from torch import Tensor

own = job()
BLOCKS: list[int] = own.settings["method"]["class_blocks"]
DIRECTIONS = 25


@torch.no_grad()
def queries(images: Tensor) -> Tensor:
    return F.normalize(own.model(pixel_values=images).last_hidden_state[:, 0], dim=-1)


def prototypes() -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Means (C, d) of all queries by class, their counts (C,), the temperature, and every client's prior (C,)."""
    sums, counts, priors = torch.zeros(0), torch.zeros(own.classes), []
    for parts in own.clients:
        mine = torch.zeros(own.classes)
        for images, labels in parts["train"].batches(own.settings["evaluation_batch"], shuffled=False):
            member = F.one_hot(labels, own.classes).float()
            found = member.T @ queries(images)
            sums = found if not len(sums) else sums + found
            mine = mine + member.sum(0)
        counts = counts + mine
        priors.append(mine / mine.sum())
    present = counts > 0
    total, classes = counts.sum(), int(present.sum())
    within = (counts - sums.square().sum(-1) / counts.clamp_min(1))[present].sum() / (total - classes)
    within = (within * (1 + classes / total)).clamp(0, 0.99)
    temperature = (within / (DIRECTIONS * (1 - within).sqrt())).clamp(0.01, 0.1)
    return sums / counts.clamp_min(1)[:, None], counts, temperature, priors


MEANS, COUNTS, TEMPERATURE, PRIORS = prototypes()


def weights(query: Tensor, prior: Tensor, labels: Tensor | None) -> Tensor:
    """s (B, C); of a training image, its own class has the mean of the others."""
    likeness = query @ F.normalize(MEANS, dim=-1).T
    if labels is not None:
        others = (COUNTS[labels, None] * MEANS[labels] - query) / (COUNTS[labels, None] - 1).clamp_min(1)
        alike = (query * F.normalize(others, dim=-1)).sum(-1)
        here = F.one_hot(labels, own.classes).bool() & (COUNTS >= 2)
        likeness = torch.where(here, alike[:, None], likeness)
    score = likeness / TEMPERATURE + torch.where(prior > 0, prior, 1.0).log()
    return torch.where((prior > 0) & (COUNTS > 0), score, -torch.inf).softmax(-1)


def logits(params: Params, images: Tensor, labels: Tensor | None = None) -> Tensor:
    mixture = weights(queries(images), params["prior"], labels)
    mixed = torch.einsum("bc,clnd->blnd", mixture, params["class_prompts"])
    shared = params["shared_prompt"][0]

    def between(block: int, before: Tensor) -> Tensor:
        if block in BLOCKS:
            return torch.cat([before[:, : len(shared)], mixed[:, BLOCKS.index(block)]], dim=1)
        return shared if block == 0 else before

    return F.linear(prompted_cls(own.model, images, between), params["head.weight"], params["head.bias"])


def prior(client: int, params: Params) -> Params:
    return {"prior": PRIORS[client]}


own.run(
    Program(
        loss=lambda params, images, labels: F.cross_entropy(logits(params, images, labels), labels),
        predict=lambda params, images: logits(params, images).softmax(-1),
        before_training=prior,
        before_test=prior,
    )
)
