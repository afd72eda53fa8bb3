"""The linear head that methods on plain vision transformers put on the CLS row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.modules.init import uniform
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

NAMES = ("head.weight", "head.bias")


def zero_head(classes: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """All classes equally likely: every client starts from the same head."""
    return {
        "head.weight": torch.zeros(classes, width, dtype=dtype, device=device),
        "head.bias": torch.zeros(classes, dtype=dtype, device=device),
    }


def read_head(params: Tensors, cls: Tensor) -> Tensor:
    return F.linear(cls, params["head.weight"], params["head.bias"])


def random_head(classes: int, width: int, dtype: torch.dtype, device: torch.device, generator: Stream) -> Tensors:
    """A linear layer's usual start: weights uniform in ±1/sqrt(width), no bias."""
    weight = uniform((classes, width), width, generator)
    return {**zero_head(classes, width, dtype, device), "head.weight": weight.to(device, dtype)}
