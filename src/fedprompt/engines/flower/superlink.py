"""Flower's SuperLink in this process, behind a gate.

Flower serves everything on one port: the Fleet API, where nodes authenticate with their keys, and the Control and Runtime
APIs, which its open-source SuperLink leaves open to anyone who can reach the port: to register a key, or to start code. The
gate gives other machines access to the Fleet API and the health route only.

A peer counts as this machine if it has a loopback address. If the server listens at a single address that is not loopback, a
peer with that same address counts too, since this machine has no other way to call it. The address is read from the
connection, never from a header: uvicorn would trust an `X-Forwarded-For` from a trusted proxy, so it is set to trust no proxy.
A request with such a header came through a proxy and counts as another machine, and so does a request from a web page in a
browser. A forwarder on this machine (`ssh -L`, a plain TCP relay, the published ports of rootless containers) makes other
peers look local: running one gives them control of the federation. Every account that can log in on this machine can reach
the Control API.

An unauthenticated peer may send only small requests, within a short time: Flower reads the whole request before it checks the
sender. The proof of identity is in the headers, so the gate checks it before the body is read. Requests of nodes are limited
in total and per node. `connection_limits.py` limits what happens before the headers are complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers

from fedprompt.engines.flower import compat
from fedprompt.engines.flower.connection_limits import SETTINGS, VISIT, Visit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

REFUSAL = json.dumps({"detail": "only nodes of the federation are served from other machines"}).encode()
TOO_LARGE = json.dumps(
    {"detail": "a message of this federation must be smaller, and signed with the key of a node"}
).encode()
NO_LENGTH = json.dumps({"detail": "a message of this federation must state its length"}).encode()
TOO_SLOW = json.dumps({"detail": "the request did not arrive in time"}).encode()
TOO_MANY = json.dumps({"detail": "the server is busy; try again"}).encode()
LARGEST_REQUEST = 2**28  # bytes of a request of a node; prompts are kilobytes, LoRA on a large model megabytes
SMALL_REQUEST = 2**16  # bytes of a request of an unauthenticated peer
IN_FLIGHT = 2 * LARGEST_REQUEST  # bytes of all unanswered larger requests of nodes together
PATIENCE, SLOWEST = 10.0, 2**17  # seconds for a body, plus one second for each of this many bytes
TURN = 20.0  # seconds that a large request waits for other requests; nodes give up after 30
BETWEEN = {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"origin"}  # proxies, browsers
OPEN_SERVERS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")  # ports of Flower without a gate

_FOR_NODES = re.compile(r"/health|/v1/fleet/[a-z-]+")


class Gate:
    """Stands before an application: all of it for this machine, the routes of nodes for others."""

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
        """Pass on a request of a node route once it is complete, within the sender's limits of size and time."""
        key = await proven_key(self._app, scope)
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
                elif parts[-1]["type"] == "http.request":  # otherwise the sender has disconnected

                    async def again() -> MutableMapping[str, Any]:
                        return parts.pop(0) if parts else await receive()

                    await self._app(scope, again, send)
        except NoRoom:
            await _refuse(send, 503, TOO_MANY)


class NoRoom(Exception):
    """Other requests have used the whole limit for too long."""


class Flight:
    """The bytes of large requests between their arrival and their answer, of all nodes and of each."""

    def __init__(self) -> None:
        self._taken: Counter[bytes] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def room_for(self, key: bytes, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes for a request, waiting if needed; a small request needs no reservation."""
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


async def proven_key(app: Application, scope: Scope) -> bytes:
    """The public key of the node that sent a request, from the proof in its headers; empty if there is none."""
    return await run_in_threadpool(compat.proven, app, Headers(scope=scope))


def _announced(scope: Scope) -> int:
    """The declared size of a request in bytes. A request without one must be small."""
    for name, value in scope["headers"]:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return min(SMALL_REQUEST, LARGEST_REQUEST)


async def _whole(receive: Receive, size: int) -> list[MutableMapping[str, Any]] | None:
    """All parts of a request; None if they exceed the limit in bytes."""
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
    headers.append((b"connection", b"close"))  # further bytes are not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def for_nodes(scope: Scope) -> bool:
    """Whether the path is a node route. It is compared exactly as it will be routed: decoded, without any tolerance."""
    return scope["type"] == "http" and not scope.get("root_path") and bool(_FOR_NODES.fullmatch(scope["path"]))


def from_this_machine(scope: Scope, own_address: bool) -> bool:
    """Whether the other end of the connection is on this machine and not a proxy."""
    if any(name.lower() in BETWEEN for name, _ in scope["headers"]):
        return False
    peer, own = _address(scope.get("client")), _address(scope.get("server"))
    return peer is not None and (peer.is_loopback or (own_address and peer == own))


def serve(arguments: Sequence[str], own_address: bool) -> None:
    """Run `flower-superlink ARGUMENTS` in this process, behind the gate, until it is stopped.

    `own_address`: it listens at a single address that is not loopback.
    """
    for name in OPEN_SERVERS:
        os.environ.pop(name, None)
    os.environ["FORWARDED_ALLOW_IPS"] = ""  # uvicorn ignores headers about the sender
    logging.getLogger("uvicorn.access").addFilter(failures_only)
    app, where = compat.superlink(arguments)
    behind_gate(app, own_address, **where)


def behind_gate(app: Any, own_address: bool = False, **settings: Any) -> None:
    """Serve an application of Flower with the gate before it and limits for its connections."""
    uvicorn.run(app=Gate(app, own_address), log_config=None, **settings, **SETTINGS)


def failures_only(record: logging.LogRecord) -> bool:
    """Keeps the frequent requests of nodes out of the log, unless they were refused."""
    status = record.args[-1] if isinstance(record.args, tuple) and record.args else None
    return not isinstance(status, int) or status >= 400


def _address(end: Sequence[Any] | None) -> IPv4Address | IPv6Address | None:
    """The address of one end of a connection; an IPv4 address mapped to IPv6 is converted back."""
    try:
        address = ip_address(str(end[0]).partition("%")[0]) if end else None
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
