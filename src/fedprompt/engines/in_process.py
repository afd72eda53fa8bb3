"""The default engine: all clients in this process on one copy of the backbone, grouped into batches of a good size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedprompt.client.runtime import ClientRuntime
from fedprompt.core.messages import Download, Failure, LocalUpdate, NextTraining
from fedprompt.errors import DivergenceError
from fedprompt.metrics.accuracy import ClientResult


class InProcess:
    """Surveys, trains and evaluates any set of clients, in any order."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtime = runtime

    def survey(self, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        for client in clients:
            try:
                yield self._runtime.survey(client, download(client))
            except DivergenceError as error:
                yield _failure(client, error)

    def train(self, round: int, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        for group in self._groups(clients):
            replies = self._runtime.train_together(round, {client: download(client) for client in group})
            for client, reply in zip(group, replies, strict=True):
                yield _failure(client, reply) if isinstance(reply, DivergenceError) else reply

    def evaluate(
        self, round: int, clients: Sequence[int], download: Download, ahead: NextTraining | None = None
    ) -> Iterator[tuple[int, ClientResult]]:
        for group in self._groups(clients):
            yield from self._runtime.evaluate_together(round, {client: download(client) for client in group}).items()

    def discard(self, clients: Iterable[int]) -> None:
        """Drop the changes of these clients since the last commit: their updates were refused."""
        for client in clients:
            self._runtime.states.discard(client)

    def take_states(self) -> dict[int, bytes]:
        """Client states changed since the last call, to be committed with the round."""
        return self._runtime.states.take_changes()

    def take_notes(self) -> list[str]:
        """What happened since the last call and the run file should say, such as memory that ran out."""
        return self._runtime.sizer.take_notes()

    def group_size(self, clients: int) -> int:
        """How many of these clients are computed as one batch."""
        return self._runtime.cohort_size()

    def _groups(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """Clients that are computed as one batch. The groups must not depend on the order of `clients`."""
        ordered, size = sorted(clients), self.group_size(len(clients))
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]


def _failure(client: int, error: DivergenceError) -> Failure:
    """A client whose training diverges fails alone."""
    return Failure(client, "finite", str(error))
