"""What clients are asked for, and what they send back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedprompt.tensors import Tensors

Download = Callable[[int], Tensors]  # what one client receives

COHORT = -1  # the client number of a reply that stands for a whole cohort


@dataclass(frozen=True)
class LocalUpdate:
    """What a client sends: there is no field in which a local tensor could travel."""

    client: int
    round: int
    """Of the download it answers."""
    upload: Tensors
    samples: int
    loss: float | None = None
    """Mean training loss; None when nothing was trained, or when it is not sent."""


@dataclass(frozen=True)
class Failure:
    """A client that took part and has nothing to send."""

    client: int
    rule: str
    """What went wrong, in a word."""
    value: str
    """And how."""


@dataclass(frozen=True)
class Training:
    """A round of training that is asked for."""

    round: int
    clients: Sequence[int]
    download: Download


NextTraining = Callable[[], Training | None]  # the training that comes next, worked out when it is asked for
