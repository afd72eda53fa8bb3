"""Random streams that are keyed by what they are for.

Two streams never share draws, so a new draw in one place cannot change another place, and the global random state is
never touched. (`fedprompt.random_streams` does the same for methods and clients; this package must do without torch.)
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """The generator of (seed, purpose): equal keys give equal draws on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, purpose)).encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, dtype="<u4").tolist()])
