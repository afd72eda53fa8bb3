"""Flower's SuperLink in this process, behind a gate.

Flower answers everything on one port: the Fleet API, where nodes prove themselves by their keys, and the Control and Runtime
APIs, which its open-source SuperLink leaves to anyone who can reach the port: to register a key, or to start code. The gate
lets other machines have the Fleet API and the health route only.

Who counts as this machine: a peer with a loopback address. Where the server listens at one address that is not of loopback,
a peer with that very address too, since this machine has no other way to call it. That is read from the connection, never
from a header: uvicorn would believe an `X-Forwarded-For` of a trusted proxy, so it is set to trust no proxy, and whatever
arrives with such a header came through a proxy and counts as another machine; so does what a page in a browser sends. What
hands connections on under an address of this machine (`ssh -L`, a plain TCP relay, the published ports of rootless
containers) speaks with its voice: who runs one hands out control of the federation. So do accounts on that machine: whoever
can log in there can reach the Control API.

Who has not proved to be a node may send small requests only, and soon: Flower reads a request whole before it asks who sent
it. The proof is in the headers, so the gate has it looked at before the body is read. What nodes send is bounded together, and
each of them by itself. `doorkeeper.py` bounds what comes before the headers are there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from fastapi import HTTPException, Request
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.superlink import extensions, main
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware

from fedprompt.engines.flower.doorkeeper import SETTINGS, VISIT, Visit
from fedprompt.errors import RunError

program: Any = import_module("flwr.superlink.cli.flower_superlink")  # the package has a function of that name

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

REFUSAL = json.dumps({"detail": "only nodes of the federation are served from other machines"}).encode()
TOO_LARGE = json.dumps({"detail": "a message of this federation is smaller, and comes with the key of a node"}).encode()
NO_LENGTH = json.dumps({"detail": "a message of this federation says how long it is"}).encode()
TOO_SLOW = json.dumps({"detail": "the request did not arrive in time"}).encode()
TOO_MANY = json.dumps({"detail": "the server has its hands full; try again"}).encode()
LARGEST_REQUEST = 2**28  # bytes of a request of a node; prompts are kilobytes, LoRA on a large model megabytes
SMALL_REQUEST = 2**16  # bytes of a request of somebody who has not proved to be a node
IN_FLIGHT = 2 * LARGEST_REQUEST  # bytes of all requests of nodes that are larger than that, until they are answered
PATIENCE, SLOWEST = 10.0, 2**17  # seconds for a body, and bytes a second that are granted on top
TURN = 20.0  # seconds that a large request waits for others to be answered; nodes give up after 30
BETWEEN = {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"origin"}  # proxies, browsers
OPEN_SERVERS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")  # ports of Flower without a gate

_FOR_NODES = re.compile(r"/health|/v1/fleet/[a-z-]+")


class Gate:
    """ASGI middleware: the whole application for this machine, the routes of nodes for others."""

    def __init__(self, app: Application, own_address: bool = False) -> None:
        """With `own_address`, a peer with the address its connection arrived at is this machine."""
        self._app, self._own_address, self._flight = app, own_address, Flight()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        nodes = scope["type"] != "lifespan" and for_nodes(scope)
        if nodes:
            await self._measured(scope, receive, send)
        elif scope["type"] == "lifespan" or from_this_machine(scope, self._own_address):
            if VISIT in scope:
                scope[VISIT].belongs_here()
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send, 403, REFUSAL)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request on a route of nodes, once it is there as a whole: no larger than its sender may, and not for ever."""
        key = await proven_key(scope)
        visit: Visit | None = scope.get(VISIT)
        if visit is not None:
            visit.belongs_to(key)
        size = _announced(scope)
        if any(name.lower() == b"transfer-encoding" for name, _ in scope["headers"]):
            await _refuse(send, 411, NO_LENGTH)
            return
        if size > (LARGEST_REQUEST if key else min(SMALL_REQUEST, LARGEST_REQUEST)):
            await _refuse(send, 413, TOO_LARGE)
            return
        try:
            async with self._flight.room_for(key, size):
                try:
                    async with asyncio.timeout(PATIENCE + size / SLOWEST):
                        parts = await _whole(receive, size)
                except TimeoutError:
                    await _refuse(send, 408, TOO_SLOW)
                    return
                if parts is None:
                    await _refuse(send, 413, TOO_LARGE)
                elif parts[-1]["type"] == "http.request":  # else its sender is gone

                    async def again() -> MutableMapping[str, Any]:
                        return parts.pop(0) if parts else await receive()

                    await self._app(scope, again, send)
        except NoRoom:
            await _refuse(send, 503, TOO_MANY)


class NoRoom(Exception):
    """Other requests are in the way, and were for a while."""


class Flight:
    """The bytes of large requests between their arrival and their answer, of all nodes and of each."""

    def __init__(self) -> None:
        self._taken: Counter[bytes] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def room_for(self, key: bytes, size: int) -> AsyncIterator[None]:
        """Room for a request of so many bytes, which may have to wait for it; a small one needs none."""
        counted = size if size > SMALL_REQUEST else 0
        try:
            async with asyncio.timeout(TURN):
                while counted and not self._fits(key, counted):
                    turn = asyncio.get_running_loop().create_future()
                    self._waiting.append(turn)
                    await turn
        except TimeoutError:
            raise NoRoom from None
        self._taken[key] += counted
        try:
            yield
        finally:
            self._taken[key] -= counted
            self._taken = +self._taken
            for turn in self._waiting:
                if not turn.done():
                    turn.set_result(None)
            self._waiting.clear()

    def _fits(self, key: bytes, size: int) -> bool:
        return self._taken[key] + size <= LARGEST_REQUEST and self._taken.total() + size <= IN_FLIGHT


async def proven_key(scope: Scope) -> bytes:
    """The public key of the node that sent a request, by the proof in its headers; empty where there is none.

    Flower's own check does the work. It also compares the body with the key, and does so again when the body is there.
    """
    headers = Headers(scope=scope)
    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
    except (KeyError, ValueError):
        return b""

    def is_known() -> bool:
        nodes = scope["app"].state.linkstate_factory.state()
        if nodes.get_node_id_by_public_key(key) is None:
            return False
        claim = SimpleNamespace(protobuf_request=ActivateNodeRequest(public_key=key))
        try:
            authenticate_node(cast(Request, SimpleNamespace(headers=headers, state=claim)))
        except HTTPException:
            return False
        return True

    return key if await run_in_threadpool(is_known) else b""


def _announced(scope: Scope) -> int:
    """How many bytes a request says it has. One that does not say has to be small."""
    for name, value in scope["headers"]:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return min(SMALL_REQUEST, LARGEST_REQUEST)


async def _whole(receive: Receive, size: int) -> list[MutableMapping[str, Any]] | None:
    """All parts of a request; None where they are more than so many bytes."""
    taken, parts = 0, []
    while True:
        part = await receive()
        taken += len(part.get("body", b""))
        if taken > size:
            return None
        parts.append(part)
        if part["type"] != "http.request" or not part.get("more_body"):
            return parts


async def _refuse(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))  # what else comes is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def for_nodes(scope: Scope) -> bool:
    """Whether the request is one that nodes make. The path is compared as it will be routed: decoded, and to the letter."""
    return scope["type"] == "http" and not scope.get("root_path") and bool(_FOR_NODES.fullmatch(scope["path"]))


def from_this_machine(scope: Scope, own_address: bool) -> bool:
    """Whether the other end of the connection is on this machine and not a proxy."""
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
    program.flower_superlink()


def failures_only(record: logging.LogRecord) -> bool:
    """Keeps out of the log what nodes ask every few seconds, unless it was refused."""
    status = record.args[-1] if isinstance(record.args, tuple) and record.args else None
    return not isinstance(status, int) or status >= 400


def put_up_gate(own_address: bool = False) -> None:
    """Hang the gate into Flower's hook for middleware and the doorkeeper into its server; raise where Flower has no such place."""
    before = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate, own_address=own_address), *before())
    built = main._get_middleware()
    if not built or built[0].cls is not Gate:  # type: ignore[comparison-overlap]
        raise RunError(
            "the installed version of Flower does not ask flwr.superlink.extensions for middleware any more, so its Control "
            "API would be open to other machines; install the one of fedprompt[flower]"
        )
    if not hasattr(program, "uvicorn"):
        raise RunError(
            "the installed version of Flower does not start its server by uvicorn.run any more, so that connections would "
            "have no limits; install the one of fedprompt[flower]"
        )
    program.uvicorn = SimpleNamespace(run=partial(uvicorn.run, **SETTINGS))


def _address(end: Sequence[Any] | None) -> IPv4Address | IPv6Address | None:
    """The address of one end of a connection; an IPv4 address that came as an IPv6 one is what it was."""
    try:
        address = ip_address(str(end[0]).partition("%")[0]) if end else None
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
