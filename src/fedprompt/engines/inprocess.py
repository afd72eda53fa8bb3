"""The default engine: every client in this process, one after the other, on one copy of the backbone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fedprompt.engines.client import ClientRuntime
from fedprompt.errors import DivergenceError
from fedprompt.evaluation.metrics import ClientResult
from fedprompt.federation.messages import Failure, Reply
from fedprompt.roles import Tensors

Download = Callable[[int], Tensors]


class InProcess:
    """Answers the federation's three questions for any set of clients, in any order."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtime = runtime

    def survey(self, clients: Sequence[int], download: Download) -> Iterator[Reply | Failure]:
        for client in clients:
            yield self._answer(client, lambda each: self._runtime.survey(each, download(each)))

    def train(self, round: int, clients: Sequence[int], download: Download) -> Iterator[Reply | Failure]:
        for client in clients:
            yield self._answer(client, lambda each: self._runtime.train(round, each, download(each)))

    def evaluate(self, round: int, clients: Sequence[int], download: Download) -> Iterator[tuple[int, ClientResult]]:
        for client in clients:
            yield client, self._runtime.evaluate(round, client, download(client))

    def discard(self, clients: Iterable[int]) -> None:
        """Forget what these clients did since the last commit: their updates were refused."""
        for client in clients:
            self._runtime.states.discard(client)

    def _answer(self, client: int, work: Callable[[int], Reply]) -> Reply | Failure:
        """A client whose training goes astray fails alone."""
        try:
            return work(client)
        except DivergenceError as error:
            return Failure(client, "finite", str(error))

    def take_states(self) -> dict[int, bytes]:
        """Client states changed since the last call, to be committed with the round."""
        return self._runtime.states.take_changes()
