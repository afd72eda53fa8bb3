"""Connections that take their time: they are ended, and keep nobody from the page meanwhile."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from fedprompt.dashboard import server as module
from fedprompt.dashboard.server import MOST_CONNECTIONS, Dashboard

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    with Dashboard([tmp_path], port=0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def connect(dashboard: Dashboard) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(dashboard.server_address[1])), 20)


@contextmanager
def slow(dashboard: Dashboard, number: int) -> Iterator[None]:
    """So many sockets that have begun a request and add a letter to it now and then, and come back when they are ended."""
    done = threading.Event()

    def drip() -> None:
        with ExitStack() as stack:
            sockets: list[socket.socket | None] = [None] * number
            while not done.is_set():
                for place, each in enumerate(sockets):
                    try:
                        if each is None:
                            sockets[place] = stack.enter_context(connect(dashboard))
                            sockets[place].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")  # type: ignore[union-attr]
                        else:
                            each.sendall(b"a")
                    except OSError:
                        sockets[place] = None
                ready.set()
                done.wait(1.0)

    ready, thread = threading.Event(), threading.Thread(target=drip)
    thread.start()
    ready.wait(30)
    try:
        yield
    finally:
        done.set()
        thread.join()


def seconds(dashboard: Dashboard, path: str = "/api/runs") -> float:
    """How long an ordinary request takes."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", int(dashboard.server_address[1]), timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read()
    connection.close()
    return time.monotonic() - start


@pytest.mark.parametrize("number", [64, 200])
def test_slow_connections_keep_nobody_from_the_page(dashboard: Dashboard, number: int) -> None:
    with slow(dashboard, number):
        for _ in range(5):
            assert seconds(dashboard) < 2
            time.sleep(0.3)


def test_connections_that_do_not_take_their_answer_keep_nobody_from_the_page(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard.pages["/large"] = ("text/plain", bytes(2**25))
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            each = stack.enter_context(connect(dashboard))
            each.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(1)
        assert seconds(dashboard) < 2


def test_a_connection_is_ended_where_its_request_does_not_come_to_an_end(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether nothing comes, or a letter now and then, on a new connection or on one that had an answer."""
    monkeypatch.setattr(module, "PATIENCE", 1.0)
    asked = b"GET /static/index.html HTTP/1.1\r\nHost: localhost\r\n\r\n"
    heads = [b"", b"GET / HT", b"GET / HTTP/1.1\r\nX: ", asked, asked + b"GET"]
    with ThreadPoolExecutor(len(heads)) as pool:
        for took in pool.map(lambda head: lasts(dashboard, head), heads):
            assert 0.5 < took < 4


def lasts(dashboard: Dashboard, head: bytes) -> float:
    start = time.monotonic()
    with connect(dashboard) as each, suppress(ConnectionError):
        each.sendall(head)
        each.settimeout(0.2)
        while time.monotonic() - start < 10:
            with suppress(TimeoutError):
                if not each.recv(2**16):
                    break
                continue
            each.sendall(b"a" if head.endswith((b" ", b"T")) else b"")
    return time.monotonic() - start


@pytest.mark.slow
def test_a_page_that_asks_now_and_then_keeps_its_connection(dashboard: Dashboard) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(dashboard.server_address[1]), timeout=20)
    connection.connect()
    place = connection.sock.getsockname()
    for _ in range(4):
        connection.request("GET", "/api/runs")
        assert connection.getresponse().read()
        time.sleep(1.5)
    assert connection.sock is not None
    assert connection.sock.getsockname() == place
    connection.close()


@pytest.mark.parametrize("letters", [2**20, 2**23])
def test_headers_together_have_a_size(dashboard: Dashboard, letters: int) -> None:
    said = b""
    with (
        connect(dashboard) as each,
        suppress(ConnectionError),
    ):  # what is sent after the answer makes the answer disappear
        each.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        for _ in range(letters // 2**15):
            each.sendall(b"X: " + b"a" * (2**15 - 5) + b"\r\n")
        each.sendall(b"\r\n")
        said = each.recv(2**16)
    assert said.startswith(b"HTTP/1.1 431 ") or not said


def test_connections_that_all_wait_for_an_answer_are_kept_and_the_next_one_is_refused(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has asked gets an answer, whatever comes after."""
    go = threading.Event()
    dashboard.questions["/api/slow"] = lambda query: go.wait(30)
    with ThreadPoolExecutor(MOST_CONNECTIONS) as pool:
        asked = [pool.submit(seconds, dashboard, "/api/slow") for _ in range(MOST_CONNECTIONS)]
        time.sleep(2)
        with connect(dashboard) as late, suppress(ConnectionError):
            late.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert late.recv(100) == b""
        go.set()
        assert all(each.result() > 1 for each in asked)
