"""What a client sends back."""

from __future__ import annotations

from dataclasses import dataclass

from fedprompt.roles import Tensors

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
