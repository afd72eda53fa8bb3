"""Flower's SuperLink in this process, behind a gate.

Flower answers everything on one port: the Fleet API, where nodes prove themselves by their keys, and the Control and Runtime
APIs, which its open-source SuperLink leaves to anyone who can reach the port: to register a key, or to start code. The gate
lets other machines have the Fleet API and the health route only.

Who counts as this machine: a peer with a loopback address. Where the server listens at one address that is not of loopback,
a peer with that very address too, since this machine has no other way to call it. That is read from the connection, never
from a header: uvicorn would believe an `X-Forwarded-For` of a trusted proxy, so it is told to trust nobody, and whatever
arrives with such a header came through a proxy and counts as another machine; so does what a page in a browser sends. What
hands connections on under an address of this machine (`ssh -L`, a plain TCP relay, the published ports of rootless
containers) speaks with its voice: who runs one hands out control of the federation. So do accounts on that machine: whoever
can log in there can reach the Control API.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from flwr.superlink import extensions, main
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware

from fedprompt.errors import RunError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

REFUSAL = json.dumps({"detail": "only nodes of the federation are served from other machines"}).encode()
TOO_LARGE = json.dumps({"detail": "a message of this federation is smaller"}).encode()
LARGEST_REQUEST = (
    2**28
)  #: bytes of a request of another machine; prompts are kilobytes, LoRA on a large model megabytes
BETWEEN = {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"origin"}  #: proxies, browsers
OPEN_SERVERS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")  #: ports of Flower without a gate

_FOR_NODES = re.compile(r"/health|/v1/fleet/[a-z-]+")


class Gate:
    """ASGI middleware: the whole application for this machine, the routes of nodes for others."""

    def __init__(self, app: Application, own_address: bool = False) -> None:
        """With `own_address`, a peer with the address its connection arrived at is this machine."""
        self._app, self._own_address = app, own_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or from_this_machine(scope, self._own_address):
            await self._app(scope, receive, send)
        elif for_nodes(scope):
            await self._measured(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send, 403, REFUSAL)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The request of a node, unless it has more bytes than any message of a prompt: Flower reads it whole."""
        taken, parts = 0, []
        while True:
            part = await receive()
            taken += len(part.get("body", b""))
            if taken > LARGEST_REQUEST:
                await _refuse(send, 413, TOO_LARGE)
                return
            parts.append(part)
            if part["type"] != "http.request" or not part.get("more_body"):
                break

        async def again() -> MutableMapping[str, Any]:
            return parts.pop(0) if parts else await receive()

        await self._app(scope, again, send)


async def _refuse(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def for_nodes(scope: Scope) -> bool:
    """Whether the request is one that nodes make. The path is compared as it will be routed: decoded, and to the letter."""
    return scope["type"] == "http" and not scope.get("root_path") and bool(_FOR_NODES.fullmatch(scope["path"]))


def from_this_machine(scope: Scope, own_address: bool) -> bool:
    """Whether the other end of the connection is on this machine and nobody stands in between who says so."""
    if any(name.lower() in BETWEEN for name, _ in scope["headers"]):
        return False
    peer, own = _address(scope.get("client")), _address(scope.get("server"))
    return peer is not None and (peer.is_loopback or (own_address and peer == own))


def serve(arguments: Sequence[str], own_address: bool) -> None:
    """Run `flower-superlink ARGUMENTS` in this process, behind the gate, until it is told to end.

    `own_address` says that it listens at one address that is not of loopback.
    """
    for name in OPEN_SERVERS:
        os.environ.pop(name, None)
    os.environ["FORWARDED_ALLOW_IPS"] = ""  # uvicorn believes no header about who calls
    logging.getLogger("uvicorn.access").addFilter(failures_only)
    put_up_gate(own_address)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def failures_only(record: logging.LogRecord) -> bool:
    """Keeps out of the log what nodes ask every few seconds, unless it was refused."""
    status = record.args[-1] if isinstance(record.args, tuple) and record.args else None
    return not isinstance(status, int) or status >= 400


def put_up_gate(own_address: bool = False) -> None:
    """Hang the gate into Flower's hook for middleware; raise unless it ends up as the outermost."""
    before = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate, own_address=own_address), *before())
    built = main._get_middleware()
    if not built or built[0].cls is not Gate:
        raise RunError(
            "the installed version of Flower does not ask flwr.superlink.extensions for middleware any more, so its Control "
            "API would be open to other machines; install the one of fedprompt[flower]"
        )


def _address(end: Sequence[Any] | None) -> IPv4Address | IPv6Address | None:
    """The address of one end of a connection; an IPv4 address that came as an IPv6 one is what it was."""
    try:
        address = ip_address(str(end[0]).partition("%")[0]) if end else None
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
