"""Requests to clients and their replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedprompt.tensors import Tensors

Download = Callable[[int], Tensors]  # what one client receives

COHORT = -1  # the client number of a reply that stands for a whole cohort


@dataclass(frozen=True)
class LocalUpdate:
    """What a client sends. It has no field for local tensors."""

    client: int
    round: int
    """The round of the download that it answers."""
    upload: Tensors
    samples: int
    loss: float | None = None
    """Mean training loss; None when nothing was trained, or when it is not sent."""
    late: int = 0
    """Rounds between its order and the round it counts in. The server notes it; no client can claim it."""
    started: Tensors | None = None
    """What a late update was trained from."""


@dataclass(frozen=True)
class Failure:
    """A client that took part and has nothing to send."""

    client: int
    rule: str
    """What went wrong, as one word."""
    value: str
    """The details."""


@dataclass(frozen=True)
class Training:
    """A request for a round of training."""

    round: int
    clients: Sequence[int]
    download: Download


NextTraining = Callable[[], Training | None]  # the next training, computed when it is needed
