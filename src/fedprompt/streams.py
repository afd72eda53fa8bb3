"""Random streams keyed by what they are for, never by the order in which things happen to run.

A run can therefore be resumed, reordered or spread over processes and still draw the same numbers: there is no generator state to save.
"""

from __future__ import annotations

import hashlib

import torch

SERVER = -1  #: the client number of draws that belong to no client


def stream(seed: int, round: int, client: int, purpose: str) -> torch.Generator:
    """A fresh CPU generator for (seed, round, client, purpose); two different keys give independent streams."""
    key = f"{seed}/{round}/{client}/{purpose}".encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)
