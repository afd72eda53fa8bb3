"""FedVPT-D with `transformers`: new prompts before every block, averaged; the head stays with the client."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch.nn.functional as F
from federated import Job, Params, Program, job, prompted_cls
from torch import Tensor


def program(own: Job) -> Program:
    def logits(params: Params, images: Tensor) -> Tensor:
        cls = prompted_cls(own.model, images, lambda block, before: params["prompt"][block])
        return F.linear(cls, params["head.weight"], params["head.bias"])

    return Program(
        loss=lambda params, images, labels: F.cross_entropy(logits(params, images), labels),
        predict=lambda params, images: logits(params, images).softmax(-1),
    )


@cache
def opened(folder: str) -> tuple[Job, Program]:
    """The files of a job, read once by a process."""
    own = Job(Path(folder))
    return own, program(own)


if __name__ == "__main__":
    own = job()
    own.run(program(own))
