"""Malicious clients, for experiments with defences.

| kind | the malicious client |
|---|---|
| nan | sends NaN in every tensor |
| scale | sends `strength` times its update |
| sign_flip | sends its update with the opposite sign, `strength` times as long |
| label_flip | trains on the labels C - 1 - y and sends the result |
| forged_weight | sends an honest update and claims `strength` times its images |
| free_rider | trains nothing and sends back what it received |

An update is the difference from the received tensors; statistics are taken as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedprompt.config import AttackConfig
from fedprompt.core.messages import LocalUpdate
from fedprompt.tensors import Tensors

STRENGTHS = {"scale": 10.0, "sign_flip": 1.0, "forged_weight": 1000.0}


def flipped(labels: Tensor, classes: int) -> Tensor:
    return classes - 1 - labels


def corrupted(reply: LocalUpdate, reference: Tensors, attack: AttackConfig) -> LocalUpdate:
    """What a malicious client sends instead of the reply it should; `reference` holds the shared tensors it started from."""
    strength = attack.strength or STRENGTHS.get(attack.kind, 1.0)
    if attack.kind == "nan":
        return replace(
            reply, upload={name: torch.full_like(tensor, torch.nan) for name, tensor in reply.upload.items()}
        )
    if attack.kind == "forged_weight":
        return replace(reply, samples=int(reply.samples * strength))
    if attack.kind in ("scale", "sign_flip"):
        factor = strength if attack.kind == "scale" else -strength
        upload = {name: _stretched(tensor, reference.get(name), factor) for name, tensor in reply.upload.items()}
        return replace(reply, upload=upload)
    return reply


def _stretched(tensor: Tensor, start: Tensor | None, factor: float) -> Tensor:
    origin = torch.zeros_like(tensor) if start is None else start.to(tensor)
    return origin + factor * (tensor - origin)
