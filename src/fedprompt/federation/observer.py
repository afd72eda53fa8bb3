"""The events an observer of a run receives, in their order. A callback is one class with some of these functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fedprompt.config import Config
from fedprompt.core.first_step import FirstStep
from fedprompt.core.messages import Failure, LocalUpdate
from fedprompt.runs.store import RoundRecord


class Observer:
    """Told what happens while it happens. This one does nothing; a callback is a class that overrides some of its functions.

    An error in an observer ends the run. What it is given must not be changed.
    """

    def started(self, config: Config, client_names: Sequence[str], rounds_done: int) -> None:
        """The run begins, or goes on after `rounds_done` rounds."""

    def noted(self, sentence: str) -> None:
        """Something a person should know, such as a default that was chosen."""

    def checked(self, check: Mapping[str, Any]) -> None:
        """The figures of the label check, where class names are read."""

    def surveyed(self, done: int, of: int) -> None:
        """So many clients have sent their statistics before round 1."""

    def cohort(self, round: int, clients: Sequence[int]) -> None:
        """These clients train in this round."""

    def stepped(self, doing: str, clients: int, share: float) -> None:
        """Some clients that are computed together have done this share of their `training`, `fitting` or `testing`."""

    def measured(self, steps: Mapping[str, FirstStep]) -> None:
        """What the first gradients of a run are like, by group of tensors."""

    def trained(self, round: int, reply: LocalUpdate) -> None:
        """The update of one client has arrived."""

    def refused(self, round: int, failure: Failure) -> None:
        """The update of one client is not used, or none came."""

    def untested(self, round: int, failure: Failure) -> None:
        """One client could not be tested."""

    def spent(self, round: int, epsilon: float) -> None:
        """The privacy budget has no room for this round; the run ends before it."""

    def evaluated(self, round: int, done: int, of: int) -> None:
        """So many clients are tested."""

    def committed(self, record: RoundRecord) -> None:
        """A round is finished and stored in the run file."""

    def warned(self, round: int, text: str) -> None:
        """A sign that training does not work."""

    def concluded(self, figures: Mapping[str, Any]) -> None:
        """The figures of the whole run, after its last round."""

    def finished(self) -> None:
        """The run has ended as planned."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Several(Observer):
    """Several observers as one, told in their order."""

    def __init__(self, *observers: Observer) -> None:
        for name in EVENTS:
            setattr(self, name, partial(self._tell, [getattr(each, name) for each in observers]))

    @staticmethod
    def _tell(functions: Sequence[Callable[..., None]], *arguments: Any) -> None:
        for function in functions:
            function(*arguments)
