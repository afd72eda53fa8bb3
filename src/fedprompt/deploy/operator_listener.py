"""`/metrics` and `/ready` of a server or a node, on loopback: for Prometheus, health checks and probes of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from typing import Any

from fedprompt.dashboard.connections import Connections
from fedprompt.dashboard.server import is_expected
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.metrics import Figures, check_prometheus, exposition
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.io.log_lines import fact

PATIENCE = 5.0  # seconds for a request, and for its answer to be taken
MOST = 16  # requests at a time; another one ends the one that was waited for longest


class Listener(ThreadingHTTPServer):
    """Answers until it is shut down."""

    daemon_threads = True

    def __init__(self, address: Address, figures: Figures) -> None:
        self.figures = figures
        self.connections = Connections(MOST)
        if address.ip is not None and address.ip.version == 6:
            self.address_family = AF_INET6
        try:
            super().__init__((address.host, address.port), _Handler)
        except OSError as error:
            raise RunError(broken("--metrics", f"be free to listen on ({error.strerror})", str(address))) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.add(request, PATIENCE):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def service_actions(self) -> None:
        self.connections.end_the_late()

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ended early is not logged."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server: Listener
    server_version, sys_version = "fedprompt", ""

    def do_GET(self) -> None:
        self.server.connections.answer(self.connection)
        status, kind, body = self._found()
        self.server.connections.wait_for(self.connection, PATIENCE)
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _found(self) -> tuple[HTTPStatus, str, bytes]:
        try:
            expected = is_expected(self.headers.get("Host"), "localhost")
        except ValueError:
            expected = False
        if not expected:  # a web page whose host name was made to mean this machine
            return HTTPStatus.FORBIDDEN, "application/json", b'{"error": "this address is not one of this machine"}\n'
        path = self.path.partition("?")[0]
        if path == "/metrics":
            return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", exposition(self.server.figures.families())
        if path == "/ready":
            ready = self.server.figures.ready
            status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
            return status, "application/json", json.dumps({"ready": ready}).encode() + b"\n"
        return HTTPStatus.NOT_FOUND, "application/json", b'{"error": "there are /metrics and /ready"}\n'

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line for every request."""


def check_metrics_address(text: str | None) -> Address | None:
    """The address of `--metrics`, as HOST:PORT or PORT; a ConfigError if other machines could reach it."""
    if text is None:
        return None
    address = Address.parse("--metrics", text if ":" in text else f"127.0.0.1:{text}")
    if not address.is_loopback:
        raise ConfigError(broken("--metrics", "be a loopback address: there is no login", text))
    check_prometheus()
    return Address("127.0.0.1", address.port) if address.ip is None else address


@contextmanager
def listening(address: Address | None, figures: Figures) -> Iterator[None]:
    """Within, the figures can be scraped."""
    if address is None:
        yield
        return
    listener = Listener(address, figures)
    threading.Thread(target=listener.serve_forever, name="metrics", daemon=True).start()
    fact(f"metrics at http://{address}/metrics")
    try:
        yield
    finally:
        listener.shutdown()
        listener.server_close()
