"""The private tensors of clients, on the disk of their node: one file for each state that a later order may need."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fedprompt.client.client_states import ClientStates
from fedprompt.core import wire
from fedprompt.engines.remote.protocol import Order, is_run
from fedprompt.errors import RunError, StorageError, broken
from fedprompt.io.bounded_read import read_bytes
from fedprompt.io.files import write_atomically
from fedprompt.runs.store import RUN_ID, RunReader
from fedprompt.tensors import Tensors

MOST_BYTES = 2**34  # of one state
SUFFIX = ".safetensors"

KEPT_AS = "kept_as"  # the only tensor of a state in the run file if clients are on nodes: the number of the node's file
NODES = "nodes"  # the folder of a run directory with the states of simulated nodes


def number_of(state: Tensors | None) -> int | None:
    """The number of a client's stored tensors, from its state in the run file; None if it never took part."""
    return None if state is None else int(state[KEPT_AS])


def number_of_run(run: RunReader) -> str:
    """The id of a run on nodes, which names a folder there: never a path, whatever a run file contains."""
    found = run.fact(RUN_ID)
    if not is_run(found):
        raise RunError(broken(f"fact {RUN_ID!r} of {str(run.directory)!r}", "be 32 hexadecimal digits", found))
    return str(found)


def stored_state(run: RunReader) -> Callable[[int], bytes | None]:
    """A function that reads a client's own tensors after a run: from the run file, or from the simulated node's folder."""
    if run.fact(RUN_ID) is None:
        return run.client_state
    nodes = run.directory / NODES / number_of_run(run)

    def read(client: int) -> bytes | None:
        blob = run.client_state(client)
        if blob is None:
            return None
        try:
            return read_bytes(nodes / str(client) / _name(int(wire.decode(blob)[KEPT_AS])), MOST_BYTES)
        except (OSError, ValueError):
            raise RunError(f"client {client} keeps its own tensors to itself, on the node it runs on") from None

    return read


class NodeState(ClientStates):
    """The states of one run's clients under `directory/<client>/<number>.safetensors`.

    An order contains the number of the state to begin with, of the one in the run file, and of the next one. All other
    states are deleted, since they are no longer needed. Nothing is deleted if the order begins with no state, or with one
    that is not here: such an order may come from an old copy of the server.
    """

    def __init__(self, directory: Path, anew: bool = False) -> None:
        """With `anew`, a client whose state is lost begins like one that never took part."""
        super().__init__(lambda client: None)
        self._directory, self._anew = directory, anew
        self._order: Order | None = None

    def begin(self, order: Order) -> None:
        self._order = order
        self._changed = {}
        folder = self.folder(order.client)
        if order.state is None or not (folder / _name(order.state)).exists():
            return
        wanted = {_name(number) for number in (order.state, order.committed) if number is not None}
        for file in folder.glob(f"*{SUFFIX}"):
            if file.name not in wanted:
                file.unlink(missing_ok=True)

    def committed(self, client: int) -> Tensors | None:
        """Load the state that the order begins with."""
        order = self._asked(client)
        if order.state is None:
            return None
        file = self.folder(client) / _name(order.state)
        try:
            return wire.decode(read_bytes(file, MOST_BYTES))
        except FileNotFoundError:
            if self._anew:
                return None
            raise RunError(
                "state must be the one this node stored when it last took part, but it is lost; a node that is started "
                "with --anew begins like one that never took part"
            ) from None
        except (OSError, ValueError) as error:
            raise StorageError(f"state of an earlier round cannot be read: {error}") from error

    def put(self, client: int, tensors: Tensors) -> None:
        """Store a state before the result of its training is sent."""
        order = self._asked(client)
        if order.keep_as is None:
            raise RunError("order.keep_as must be a number where a state is to be kept, got None")
        super().put(client, tensors)
        folder = self.folder(client)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(folder / _name(order.keep_as), wire.encode(tensors))
        os.chmod(folder / _name(order.keep_as), 0o600)

    def _asked(self, client: int) -> Order:
        if self._order is None or self._order.client != client:
            raise RunError(f"state of client {client} must be named by an order")
        return self._order

    def folder(self, client: int) -> Path:
        """Where a client's files are."""
        return self._directory / str(client)


def _name(number: int) -> str:
    return f"{number}{SUFFIX}"
