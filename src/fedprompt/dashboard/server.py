"""The server: some fixed files and a few kinds of requests, for this machine. It has no login, and writes nothing."""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fedprompt.dashboard.connections import Connections, Head
from fedprompt.dashboard.downsampling import plain
from fedprompt.dashboard.run_list import Catalogue
from fedprompt.dashboard.views import Missing, Unusable, Views
from fedprompt.errors import ConfigError, FedpromptError, broken

PORT = 8050
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LONGEST_PATH = 4096  # characters of a request's path and query
MOST_CONNECTIONS = 64  # at a time; a browser has six
PATIENCE = (
    5.0  # seconds for a complete request, from the start of the connection or the last answer; the page is faster
)
TAKING = 15.0  # seconds for the client to receive an answer


def pages() -> dict[str, tuple[str, bytes]]:
    """The static files: type and content by path. No other file can be requested."""
    found = {}
    for file in resources.files("fedprompt.dashboard").joinpath("static").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[f"/static/{file.name}"] = (kind, file.read_bytes())
    return {"/": found["/static/index.html"], **found}


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_expected(header: str | None, host: str) -> bool:
    """Whether a request was meant for this server.

    An attacker's site can resolve its own host name to this machine (DNS rebinding), and the browser then lets it read our
    answers. Such a request has that host name; ours have an address, `localhost`, or the name the server was started with.
    """
    name = urlsplit(f"//{header or ''}").hostname or ""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", host.lower())
    return address.is_loopback or not is_loopback(host)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedprompt", ""
    timeout = TAKING
    server: Dashboard

    def setup(self) -> None:
        super().setup()
        self._head = Head(self.rfile)
        self.rfile = self._head  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        self.server.connections.wait_for(self.connection, PATIENCE)
        self._head.begin()
        super().handle_one_request()

    def parse_request(self) -> bool:
        complete = super().parse_request()
        self.server.connections.answer(self.connection)
        return complete

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _refuse(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, *_error("only GET and HEAD"), {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, body: bool) -> None:
        status, kind, content = self._found()
        self._send(status, kind, content, {}, body)

    def _found(self) -> tuple[HTTPStatus, str, bytes]:
        try:
            expected = is_expected(self.headers.get("Host"), self.server.host)
        except ValueError:
            expected = False
        if not expected:
            return HTTPStatus.FORBIDDEN, *_error("this address is not one of the dashboard's")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and self.path != "/":
            return HTTPStatus.FORBIDDEN, *_error("only the dashboard's own page may send requests")
        if len(self.path) > LONGEST_PATH:
            return HTTPStatus.REQUEST_URI_TOO_LONG, *_error(f"at most {LONGEST_PATH} characters")
        path, _, text = self.path.partition("?")
        if path in self.server.pages:
            return HTTPStatus.OK, *self.server.pages[path]
        question = self.server.questions.get(path)
        if question is None:
            return HTTPStatus.NOT_FOUND, *_error("there is no such page")
        try:
            return HTTPStatus.OK, *_json(plain(question(dict(parse_qsl(text, max_num_fields=20)))))
        except Missing as error:
            return HTTPStatus.NOT_FOUND, *_error(str(error))
        except (Unusable, ValueError) as error:
            return HTTPStatus.BAD_REQUEST, *_error(str(error))
        except (FedpromptError, OSError) as error:  # a run that was damaged or removed in this moment
            return HTTPStatus.CONFLICT, *_error(str(error))
        except Exception:
            traceback.print_exc()
            return HTTPStatus.INTERNAL_SERVER_ERROR, *_error("a bug in fedprompt; see the terminal of the dashboard")

    def _send(self, status: HTTPStatus, kind: str, content: bytes, more: dict[str, str], body: bool = True) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the rest of the connection is not a request
        self.send_response(status)
        headers = {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content)), **more}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.server.connections.wait_for(self.connection, TAKING)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # a page that was closed
            super().handle()

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line for every request."""


def _json(value: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _error(error: str) -> tuple[str, bytes]:
    return _json({"error": error})


class Dashboard(ThreadingHTTPServer):
    """Serves the runs below some folders until it is shut down."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(
        self,
        folders: Sequence[Path],
        host: str = "127.0.0.1",
        port: int | None = None,
        federation: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Without a port: the default one, or a free one if that is taken. `federation` tells how a federation stands."""
        self.host = host
        self.pages = pages()
        views = Views(Catalogue(folders))
        self.questions: dict[str, Callable[[dict[str, str]], Any]] = {
            f"/api/{name}": getattr(views, name)
            for name in ("runs", "run", "clients", "classes", "settings", "compare")
        }
        self.questions["/api/about"] = lambda query: {"federation": federation is not None}
        if federation is not None:
            self.questions["/api/federation"] = lambda query: federation()
        self.connections = Connections(MOST_CONNECTIONS)
        try:
            found = socket.getaddrinfo(host, port or PORT, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError(broken("--host", f"be an address of this machine ({error.strerror})", host)) from error
        self.address_family, address = found[0][0], found[0][4][0]
        self._bind(str(address), port)

    def _bind(self, address: str, port: int | None) -> None:
        for attempt in [port] if port is not None else [PORT, 0]:
            try:
                super().__init__((address, attempt), Handler)
                return
            except OSError as error:
                problem = error
        if port is None or problem.errno in (98, 48, 13):
            raise ConfigError(broken("--port", f"be free ({problem.strerror})", port)) from problem
        raise ConfigError(
            broken("--host", f"be an address of this machine ({problem.strerror})", self.host)
        ) from problem

    @property
    def address(self) -> str:
        """What to type into a browser."""
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
            self.host, f"[{self.host}]" if ":" in self.host else self.host
        )
        return f"http://{name}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.add(request, PATIENCE):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by the server's loop twice a second, and after every connection."""
        self.connections.end_the_late()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()
