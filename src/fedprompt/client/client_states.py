"""Local tensors of clients: read from the run file, changed in memory, written back when the round is committed."""

from __future__ import annotations

from collections.abc import Callable

from fedprompt.core import wire
from fedprompt.tensors import Tensors


class ClientStates:
    """What each client keeps to itself. Only clients of the round under way are held in memory."""

    def __init__(self, stored: Callable[[int], bytes | None]) -> None:
        self._stored = stored
        self._changed: dict[int, Tensors] = {}

    def get(self, client: int) -> Tensors | None:
        """None for a client that never took part."""
        return self._changed[client] if client in self._changed else self.committed(client)

    def committed(self, client: int) -> Tensors | None:
        """The same as of the last commit."""
        blob = self._stored(client)
        return None if blob is None else wire.decode(blob)

    def put(self, client: int, tensors: Tensors) -> None:
        self._changed[client] = wire.in_order({name: tensor.detach() for name, tensor in tensors.items()})

    def discard(self, client: int) -> None:
        """As if the client had not taken part since the last commit."""
        self._changed.pop(client, None)

    def take_changes(self) -> dict[int, bytes]:
        """The states to commit with the round."""
        changes = {client: wire.encode(tensors) for client, tensors in sorted(self._changed.items())}
        self._changed = {}
        return changes
