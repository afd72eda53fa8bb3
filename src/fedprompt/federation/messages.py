"""What clients are asked for, and what they send back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedprompt.roles import Tensors

Download = Callable[[int], Tensors]  #: what one client receives

COHORT = -1  #: the client number of a reply that stands for a whole cohort


@dataclass(frozen=True)
class Reply:
    """What a client sends: there is no field in which a local tensor could travel."""

    client: int
    round: int  #: of the download it answers
    upload: Tensors
    samples: int
    loss: float | None = None  #: mean training loss; None when nothing was trained, or when it is nobody's business


@dataclass(frozen=True)
class Failure:
    """A client that took part and has nothing to send."""

    client: int
    rule: str  #: what went wrong, in a word
    value: str  #: and how


@dataclass(frozen=True)
class Training:
    """A round of training that is asked for."""

    round: int
    clients: Sequence[int]
    download: Download


Ahead = Callable[[], Training | None]  #: the training that comes next, worked out when it is asked for
