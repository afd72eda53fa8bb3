"""Local tensors of clients: read from the run file, changed in memory, written back when the round is committed.

What was committed last stays where it was computed, a GPU for example, so that the next round begins without a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from fedprompt.core import wire
from fedprompt.tensors import Tensors

KEPT_BYTES = 256 * 2**20  # of committed states; those used longest ago are read from the run file again


class ClientStates:
    """What each client keeps to itself."""

    def __init__(self, stored: Callable[[int], bytes | None], capacity: int = KEPT_BYTES) -> None:
        self._stored = stored
        self._changed: dict[int, Tensors] = {}
        self._kept: OrderedDict[int, Tensors] = OrderedDict()
        self._capacity, self._bytes = capacity, 0

    def get(self, client: int) -> Tensors | None:
        """None for a client that never took part."""
        return self._changed[client] if client in self._changed else self.committed(client)

    def committed(self, client: int) -> Tensors | None:
        """The same as of the last commit."""
        if client in self._kept:
            self._kept.move_to_end(client)
            return self._kept[client]
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
        for client, tensors in self._changed.items():
            self._keep(client, tensors)
        self._changed = {}
        return changes

    def _keep(self, client: int, tensors: Tensors) -> None:
        # copies: a part of a stack of clients has other strides than what a resumed run reads, and a product other bits
        tensors = {name: each.clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}
        self._bytes += wire.size_in_bytes(tensors) - wire.size_in_bytes(self._kept.pop(client, {}))
        self._kept[client] = tensors
        while self._bytes > self._capacity:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= wire.size_in_bytes(oldest)
