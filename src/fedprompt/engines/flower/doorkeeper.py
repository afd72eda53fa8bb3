"""Connections to the SuperLink, from the moment they are accepted: how many there may be, how long each may take to say what
it wants, and how much it may say before that.

uvicorn has no limit for any of these, and learns of a connection only after TLS has been agreed on. So connections are
counted below TLS. Where one too many of a kind comes, the oldest of that kind goes: who holds connections open blocks no one
out. Strangers are one kind, every node is one of its own, and this machine is not counted.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS = 10.0  # seconds from being accepted, or from the last answer, to the end of the next request's headers
FAREWELL = 2.0  # seconds for the other side to agree that a connection ends
LARGEST_HEADERS = 2**15  # bytes; those of a node have less than a kilobyte
STRANGERS = 64  # connections of those who have not proved who they are
OF_ONE_NODE = 32
VISIT = "fedprompt.visit"  # the field of a request that holds its connection
TOO_MUCH = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Visits:
    """All connections that are counted, by whose they are; the oldest of each first. The empty key is a stranger's."""

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
        """The connection is there; with TLS this is told twice, and the one below counts."""
        if self._transport is None:
            self._transport = transport
            self._visits.add(self, self._key)
            self.hurry(HEADERS)

    def belongs_to(self, key: bytes) -> None:
        """It is that node's from now on, or again a stranger's."""
        if key != self._key and self._transport is not None:
            self._visits.remove(self, self._key)
            self._key = key
            self._visits.add(self, key)

    def belongs_here(self) -> None:
        """It is one of this machine, which is not counted."""
        self._visits.remove(self, self._key)

    def hurry(self, seconds: float) -> None:
        """End it unless there is a request by then."""
        self.wait()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def wait(self) -> None:
        """It is our turn: no time is running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """At once, without a word."""
        self.over()
        if self._transport is not None:
            self._transport.abort()

    def over(self) -> None:
        """The connection is gone."""
        self.wait()
        self._visits.remove(self, self._key)


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's end of a connection, with a limit for the time and the size of a request's headers."""

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
            return  # refused; what else comes is not read
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
    """TLS on a connection that is counted from before it."""

    max_size = 2**16  # bytes of a buffer that every connection has, and asyncio makes four times as large

    def __init__(self, loop: asyncio.AbstractEventLoop, inner: GuardedHttp, context: ssl.SSLContext) -> None:
        self._visit = inner.visit
        limits = {"ssl_handshake_timeout": HEADERS, "ssl_shutdown_timeout": FAREWELL}
        super().__init__(loop, inner, context, None, server_side=True, **limits)  # type: ignore[arg-type]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._visit.begin(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._visit.over()
        super().connection_lost(exc)


class Loop(asyncio.SelectorEventLoop):
    """The loop that the server runs in; it differs in what happens to a connection that is accepted."""

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
"""What uvicorn has to be called with."""
