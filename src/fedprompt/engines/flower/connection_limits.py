"""Limits for connections to the SuperLink: their number, and the time and size of a request's headers.

uvicorn has no limit for any of these, and sees a connection only after the TLS handshake. So connections are counted below
TLS, in groups: one group for all unauthenticated peers and one for each node. This machine is not counted. When a group is
full, its oldest connection is closed, so open connections cannot block others.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS = 10.0  # seconds from the accept, or from the last answer, to the end of the next request's headers
SHUTDOWN = 2.0  # seconds for the TLS shutdown of a connection
LARGEST_HEADERS = 2**15  # bytes; a node sends less than a kilobyte
STRANGERS = 64  # connections of all unauthenticated peers together
OF_ONE_NODE = 32
VISIT = "fedprompt.visit"  # the field of a request's scope that contains its connection
TOO_MUCH = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Visits:
    """The counted connections by key, the oldest first. The empty key is for unauthenticated peers."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[Visit, None]] = {}

    def add(self, visit: Visit, key: bytes) -> None:
        own = self._of.setdefault(key, {})
        own[visit] = None
        if len(own) > (OF_ONE_NODE if key else STRANGERS):
            next(iter(own)).end()

    def remove(self, visit: Visit, key: bytes) -> None:
        own = self._of.get(key, {})
        own.pop(visit, None)
        if not own:
            self._of.pop(key, None)


VISITS = Visits()


class Visit:
    """One connection."""

    def __init__(self, visits: Visits = VISITS) -> None:
        self._visits, self._key = visits, b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """The connection is open. With TLS this is called twice; the first call (the transport below TLS) counts."""
        if self._transport is None:
            self._transport = transport
            self._visits.add(self, self._key)
            self.hurry(HEADERS)

    def belongs_to(self, key: bytes) -> None:
        """Count it for this node from now on, or again as unauthenticated."""
        if key != self._key and self._transport is not None:
            self._visits.remove(self, self._key)
            self._key = key
            self._visits.add(self, key)

    def belongs_here(self) -> None:
        """It comes from this machine, so it is not counted."""
        self._visits.remove(self, self._key)

    def hurry(self, seconds: float) -> None:
        """Close it unless a request arrives within these seconds."""
        self.wait()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def wait(self) -> None:
        """Stop the timer: the server is working on a request."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Close it immediately, without an answer."""
        self.over()
        if self._transport is not None:
            self._transport.abort()

    def over(self) -> None:
        """The connection was closed."""
        self.wait()
        self._visits.remove(self, self._key)


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits for the time and the size of a request's headers."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.visit = Visit()
        self._in_headers, self._taken = True, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.visit.begin(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.visit.over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return  # refused; further bytes are not read
        self._taken += len(data)
        super().data_received(data)
        if self._in_headers and self._taken > LARGEST_HEADERS:
            self.transport.write(TOO_MUCH)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[VISIT] = self.visit

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self.visit.wait()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers, self._taken = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.visit.hurry(HEADERS)
        super().on_response_complete()


class Tls(SSLProtocol):
    """TLS on a connection that is counted before the handshake."""

    max_size = 2**16  # bytes of the buffer of each connection; asyncio's default is four times as large

    def __init__(self, loop: asyncio.AbstractEventLoop, inner: GuardedHttp, context: ssl.SSLContext) -> None:
        self._visit = inner.visit
        limits = {"ssl_handshake_timeout": HEADERS, "ssl_shutdown_timeout": SHUTDOWN}
        super().__init__(loop, inner, context, None, server_side=True, **limits)  # type: ignore[arg-type]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._visit.begin(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._visit.over()
        super().connection_lost(exc)


class Loop(asyncio.SelectorEventLoop):
    """The event loop of the server. It differs only in how a connection is accepted."""

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], GuardedHttp],
        *arguments: Any,
        ssl: ssl.SSLContext | None = None,
        **more: Any,
    ) -> asyncio.Server:
        def accepted() -> asyncio.BaseProtocol:
            inner = protocol_factory()
            return inner if ssl is None else Tls(self, inner, ssl)

        return await super().create_server(accepted, *arguments, **more)


SETTINGS: dict[str, Any] = {"http": GuardedHttp, "loop": f"{__name__}:{Loop.__name__}", "ws": "none"}
"""Arguments for uvicorn."""
