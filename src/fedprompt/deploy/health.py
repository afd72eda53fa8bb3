"""Checks whether a server runs and refuses unauthenticated requests. Free of Flower."""

from __future__ import annotations

import http.client
import socket
import ssl

from fedprompt.deploy.expiry import why_silent
from fedprompt.deploy.folders import ServerFolder
from fedprompt.errors import RunError

PATIENCE = 5.0  # seconds for an answer
BEYOND = 2**15  # characters of a header, more than allowed
OPEN, CLOSED = "/health", "/v1/control/list-nodes"


def answers(folder: ServerFolder) -> bool:
    """Whether the server of this folder runs: the right certificate, and a healthy status."""
    return _status(folder, "GET", OPEN, {}) == 200


def is_running(folder: ServerFolder) -> bool:
    """The same, but raise if something listens there and does not answer like this server."""
    address = folder.called_as
    try:
        with socket.create_connection((address.host, address.port), PATIENCE):
            pass
    except ConnectionRefusedError:
        return False
    except OSError as error:
        raise RunError(f"cannot tell whether a server runs at {address}: {error}") from error
    if not answers(folder):
        raise why_silent(folder) or RunError(
            f"what listens at {address} does not answer like the server of {folder.path}"
        )
    return True


def keeps_strangers_out(folder: ServerFolder) -> bool:
    """Whether the gate works: a request with a proxy header must not count as local."""
    return _status(folder, "POST", CLOSED, {"X-Forwarded-For": "192.0.2.1"}) == 403


def has_limits(folder: ServerFolder) -> bool:
    """Whether the connection limits work: it must refuse headers without an end that are longer than those of any node."""
    connection = _connection(folder)
    try:
        connection.connect()
        connection.send(f"GET {OPEN} HTTP/1.1\r\nX-Long: ".encode() + b"a" * BEYOND)
        answer = http.client.HTTPResponse(connection.sock, method="GET")
        answer.begin()
        return answer.status == 431
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _status(folder: ServerFolder, method: str, path: str, headers: dict[str, str]) -> int | None:
    """The status of the answer; None if there is none."""
    connection = _connection(folder)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _connection(folder: ServerFolder) -> http.client.HTTPConnection:
    address = folder.called_as
    if not folder.secure:
        return http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE)
    context = ssl.create_default_context(cafile=folder.ca_certificate)
    return http.client.HTTPSConnection(address.host, address.port, timeout=PATIENCE, context=context)
