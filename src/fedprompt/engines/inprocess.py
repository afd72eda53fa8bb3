"""The default engine: every client in this process, one after the other, on one copy of the backbone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fedprompt.engines.client import ClientRuntime
from fedprompt.evaluation.metrics import ClientResult
from fedprompt.federation.messages import Reply
from fedprompt.roles import Tensors

Download = Callable[[int], Tensors]


class InProcess:
    """Answers the federation's three questions for any set of clients, in any order."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtime = runtime

    def survey(self, clients: Sequence[int], download: Download) -> Iterator[Reply]:
        for client in clients:
            yield self._runtime.survey(client, download(client))

    def train(self, round: int, clients: Sequence[int], download: Download) -> Iterator[Reply]:
        for client in clients:
            yield self._runtime.train(round, client, download(client))

    def evaluate(self, round: int, clients: Sequence[int], download: Download) -> Iterator[tuple[int, ClientResult]]:
        for client in clients:
            yield client, self._runtime.evaluate(round, client, download(client))

    def take_states(self) -> dict[int, bytes]:
        """Client states changed since the last call, to be committed with the round."""
        return self._runtime.states.take_changes()
