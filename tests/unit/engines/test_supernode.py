"""A node's loop over its connection: repeated requests, refusals, stopped runs, and messages that are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedprompt.engines.flower import compat, supernode
from fedprompt.engines.flower.supernode import BRISK, IDLE
from fedprompt.engines.flower.transport import ANSWER, ORDER, RECORD
from fedprompt.errors import RunError

pytestmark = pytest.mark.unit


class Enough(Exception):
    """Ends a loop that has no end."""


def status(number: int, code: int | None = None) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1")
    answer = httpx.Response(number, json={"code": code, "detail": "no"}, request=request)
    return httpx.HTTPStatusError("no", request=request, response=answer)


NOT_ADMITTED = status(400, compat.NOT_ADMITTED)


class Server:
    """Stands for the calls of a node: each gives what comes next in its list, or raises it."""

    def __init__(self, **said: list[Any]) -> None:
        self._said, self.pushed = said, []

    def activate(self) -> Any:
        return self._next("activate")

    def pull(self) -> Any:
        return self._next("pull")

    def push(self, message: Message, seconds: float) -> None:
        found = self._next("push")
        self.pushed.append((message.content.config_records[RECORD][ANSWER], found))

    def _next(self, name: str) -> Any:
        waiting = self._said.get(name, [])
        found = waiting.pop(0) if waiting else Enough()
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only within a task."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def order(content: bytes) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord({ORDER: content})}), 1, "train")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(supernode.time, "sleep", found.append)
    return found


@pytest.fixture
def heard() -> list[bool]:
    return []


def loop(server: Server, work: Callable[[bytes], bytes], heard: list[bool], end: Exception | None = None) -> None:
    """The loop until the server has nothing more to say."""
    with pytest.raises(type(end) if end else SystemExit):
        supernode._attend(server, work, heard.append)  # type: ignore[arg-type]


def until_empty(server: Server) -> Server:
    """The same server, which ends the node like a signal when it has nothing more to say."""
    server._said["pull"].append(None)
    original = server._next

    def pull() -> Any:
        if not server._said["pull"]:
            raise SystemExit(0)
        return original("pull")

    server.pull = pull  # type: ignore[method-assign]
    return server


def test_a_node_is_brisk_after_a_message_and_patient_otherwise(slept: list[float], heard: list[bool]) -> None:
    server = until_empty(Server(pull=[None, order(b"a")], push=[1]))
    loop(server, lambda blob: blob + b"!", heard)
    assert server.pushed == [(b"a!", 1)]
    assert slept == [IDLE, BRISK]
    assert heard == [True] * 4


def test_a_server_that_is_away_is_waited_for(slept: list[float], heard: list[bool]) -> None:
    server = until_empty(Server(pull=[httpx.ConnectError("no"), status(500), order(b"a")], push=[status(502), 1]))
    loop(server, lambda blob: blob, heard)
    assert server.pushed == [(b"a", 1)]
    assert heard[:2] == [False, False]
    assert True in heard


def test_the_answer_to_a_stopped_run_is_dropped_and_the_node_goes_on(slept: list[float], heard: list[bool]) -> None:
    server = until_empty(Server(pull=[order(b"a"), status(403), order(b"b")], push=[status(403), 2]))
    loop(server, lambda blob: blob, heard)
    assert server.pushed == [(b"b", 2)]


def test_a_message_that_flower_lost_does_not_end_the_node(
    slept: list[float], heard: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    server = until_empty(Server(pull=[ValueError("object x is gone"), order(b"b")], push=[1]))
    loop(server, lambda blob: blob, heard)
    assert server.pushed == [(b"b", 1)]
    assert "message lost: ValueError: object x is gone" in capsys.readouterr().err


def test_a_request_that_is_refused_does_not_end_the_node(
    slept: list[float], heard: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    server = until_empty(Server(pull=[order(b"a"), status(400), order(b"b")], push=[status(404), 2]))
    loop(server, lambda blob: blob, heard)
    assert server.pushed == [(b"b", 2)]
    assert capsys.readouterr().err.count("message lost: HTTPStatusError") == 2


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (status(401), "the server no longer admits this node"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]"), r"no connection to the server: \[SSL"),
    ],
)
def test_what_will_not_change_ends_the_node(said: Exception, text: str, slept: list[float], heard: list[bool]) -> None:
    with pytest.raises(RunError, match=text):
        supernode._attend(Server(pull=[said]), lambda blob: blob, heard.append)  # type: ignore[arg-type]


def test_a_refused_node_asks_again(slept: list[float], heard: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    """A node that was killed is let in once the server has missed it."""
    server = Server(activate=[NOT_ADMITTED] * 3 + [7])
    assert supernode._activated(server, heard.append) == 7  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("not admitted yet: its key must be admitted there") == 1


def test_a_node_that_is_never_let_in_is_told_why(slept: list[float], heard: list[bool]) -> None:
    with pytest.raises(RunError, match="the server does not admit this node: its key must be admitted"):
        supernode._activated(Server(activate=[NOT_ADMITTED] * 2), heard.append, -1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [400, 403])
def test_other_refusals_are_passed_on_at_once(number: int, slept: list[float], heard: list[bool]) -> None:
    with pytest.raises(RunError, match="no connection to the server"):
        supernode._activated(Server(activate=[status(number, 1), 7]), heard.append)  # type: ignore[arg-type]
    assert slept == []


class Redirecting(BaseHTTPRequestHandler):
    """A server that sends a node elsewhere, and notes who comes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/v1/"):
            self.send_response(307)
            self.send_header("Location", "/inside-the-hospital")
        else:
            seen.append(self.path)
            self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


seen: list[str] = []


def test_a_server_does_not_send_a_node_elsewhere() -> None:
    """It reached other machines from inside the site, with the node's proof and its update, also without TLS."""
    server = HTTPServer(("127.0.0.1", 0), Redirecting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    calls = compat.FleetCalls(f"127.0.0.1:{server.server_address[1]}", None, None)
    try:
        with pytest.raises(httpx.HTTPStatusError):
            calls.activate()
    finally:
        calls.close()
        server.shutdown()
        server.server_close()
    assert seen == []
