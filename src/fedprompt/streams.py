"""Random streams keyed by what they are for, never by the order in which things happen to run.

A run can therefore be resumed, reordered or spread over processes and still draw the same numbers: there is no generator state to save.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

WORDS = slice(24, 24 + 624 * 8)  #: where the state of torch's generator has its 624 words, eight bytes for each

SERVER = -1  #: the client number of draws that belong to no client


def stream(seed: int, round: int, client: int, purpose: str) -> torch.Generator:
    """A fresh CPU generator for (seed, round, client, purpose); two different keys give independent streams."""
    key = f"{seed}/{round}/{client}/{purpose}".encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)


def sealed(key: bytes) -> torch.Generator:
    """A generator that nobody can guess who does not know the key.

    A seed would not do: torch makes 32 bits of it, which can be tried out. Here the whole state follows from the key.
    """
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state().numpy().copy()
    words = np.frombuffer(hashlib.shake_256(key).digest(624 * 4), dtype="<u4")
    state[WORDS].view("<u8")[:] = words
    generator.set_state(torch.from_numpy(state))
    return generator
