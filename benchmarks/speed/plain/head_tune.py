"""Head-Tune with `transformers`: a linear head on the CLS row of a frozen model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from federated import Params, Program, job
from torch import Tensor

own = job()


def logits(params: Params, images: Tensor) -> Tensor:
    with torch.no_grad():
        cls = own.model(pixel_values=images).last_hidden_state[:, 0]
    return F.linear(cls, params["head.weight"], params["head.bias"])


own.run(
    Program(
        loss=lambda params, images, labels: F.cross_entropy(logits(params, images), labels),
        predict=lambda params, images: logits(params, images).softmax(-1),
    )
)
