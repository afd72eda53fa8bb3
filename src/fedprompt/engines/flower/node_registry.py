"""The nodes that a SuperLink admits, with the names of their registered keys.

`flwr supernode list` omits names and keys, and `flwr supernode register` takes two seconds for a key, so this module calls
the same Control API itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from fedprompt.engines.flower.compat import (
    FlowerError,
    ListNodesRequest,
    RegisterNodeRequest,
    UnregisterNodeRequest,
    control_client,
)
from fedprompt.errors import RunError

GONE = "unregistered"
SINCE = {"registered": "registered_at", "online": "last_activated_at", "offline": "last_deactivated_at"}


@dataclass(frozen=True)
class Node:
    """A registered node. In an insecure federation a node registers itself."""

    id: int
    name: str
    """The name of its key; empty in an insecure federation."""
    status: str
    """registered (never connected), online or offline."""
    since: str
    """When this status began, as ISO 8601 in UTC."""
    key: bytes
    """Its public key, as PEM."""


class Register:
    """The register of a running SuperLink. ConnectionError if none answers, RunError if it refuses."""

    def __init__(self, address: str, ca_certificate: Path | None) -> None:
        self._client = control_client(address, ca_certificate)

    def __enter__(self) -> Register:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def nodes(self) -> list[Node]:
        """All nodes except removed ones, by name."""
        with _understood():
            found = self._client.ListNodes(ListNodesRequest()).nodes_info
        here = [each for each in found if each.status != GONE]
        nodes = [
            Node(each.node_id, each.name, each.status, getattr(each, SINCE[each.status]), each.public_key)
            for each in here
        ]
        return sorted(nodes, key=lambda node: (node.name, node.id))

    def add(self, name: str, key: bytes) -> None:
        """Admit a key. A removed key cannot be admitted again."""
        with _understood():
            self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def remove(self, node: Node) -> None:
        """Remove a node: its messages are refused from now on."""
        with _understood():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node.id))


@contextmanager
def _understood() -> Iterator[None]:
    """Turn HTTP failures into our errors."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        reported = FlowerError.from_json(error.response.text)
        raise RunError(f"Flower: {reported.message if reported else error}") from error
    except httpx.HTTPError as error:
        raise ConnectionError(str(error)) from error
