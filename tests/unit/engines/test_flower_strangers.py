"""What strangers on the network can do to the server's memory and to its nodes: floods on loopback, of a few seconds each."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedprompt.deploy.certificates import public_pem, write_authority_and_server, write_site_key

pytestmark = [pytest.mark.unit, pytest.mark.timeout(180)]

MIB = 2**20
ROUTE = "/v1/fleet/push-object"
SCRIPT = Path(__file__).parents[2] / "gate_server.py"
ELSEWHERE = ("X-Forwarded-For: 192.0.2.7\r\n", "")  # as a request of another machine, and as one of this machine


@dataclass(frozen=True)
class Server:
    folder: Path
    port: int
    pid: int
    id: int = 0
    """Of the honest node."""

    @property
    def memory(self) -> float:
        """MiB that the process has in use."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the server is gone")

    @property
    def connections(self) -> int:
        """Sockets that it holds."""
        links = []
        for each in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(each))
        return sum(link.startswith("socket:") for link in links)

    def connect(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        return context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), 20), server_hostname="localhost")

    def node(self, name: str) -> FleetHttpClient:
        """The client of Flower's own nodes, with the key of that name."""
        key = serialization.load_ssh_private_key((self.folder / name / "key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        proof = NodeAuthHttpInterceptor(key, key.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        root = (self.folder / "ca.crt").read_bytes()
        return FleetHttpClient.from_server_address(f"localhost:{self.port}", False, root, interceptors=[version, proof])

    def push(self, size: int, name: str = "honest") -> int:
        """The status of the answer to an object of so many bytes by the node of that name, for a run that is none."""
        request = PushObjectRequest(
            node=Node(node_id=self.id), run_id=1, object_id="a" * 64, object_content=bytes(size)
        )
        with self.node(name) as client:
            try:
                client.PushObject(request)
            except httpx.HTTPStatusError as error:
                return error.response.status_code
        return 200

    def is_well(self) -> bool:
        """Whether the honest node gets through with a sign of life, soon."""
        start = time.monotonic()
        with self.node("honest") as client:
            answer = client.SendNodeHeartbeat(
                SendNodeHeartbeatRequest(node=Node(node_id=self.id), heartbeat_interval=30.0)
            )
        return bool(answer.success) and time.monotonic() - start < 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gate")
    write_authority_and_server(folder, "localhost")
    for name in ("honest", "stranger"):
        (folder / name).mkdir()
        write_site_key(folder / name, name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, str(SCRIPT), str(folder), str(port), str(folder / "honest" / "key.pub")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    made = Server(folder, port, process.pid)
    try:
        until(lambda: is_listening(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        with made.node("honest") as client:
            key = public_pem((folder / "honest" / "key.pub").read_bytes(), "honest")
            id = client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0)).node_id
        made = replace(made, id=id)
        assert made.is_well()  # everything that comes late is loaded now
        yield made
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def until(done: Callable[[], bool], longest: float = 60.0) -> float:
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < longest
        time.sleep(0.05)
    return time.monotonic() - start


def pour(connection: ssl.SSLSocket, amount: int, *heads: str) -> None:
    """Send a head and so many bytes behind it, as long as anybody takes them."""
    with suppress(OSError):
        connection.sendall("\r\n".join(heads).encode())
        for _ in range(amount // MIB):
            connection.sendall(bytes(MIB))


def post(size: int, more: str = "", path: str = ROUTE) -> str:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n{more}\r\n"


@pytest.mark.parametrize("origin", ELSEWHERE)
def test_large_requests_without_a_key_take_no_memory(server: Server, origin: str) -> None:
    before, size = server.memory, 40 * MIB
    with ExitStack() as held, ThreadPoolExecutor(6) as pool:
        flood = [held.enter_context(server.connect()) for _ in range(6)]
        list(pool.map(lambda each: pour(each, size, post(size + 1, origin)), flood))
        assert server.memory - before < 48
        assert server.is_well()


def test_a_key_that_nobody_admitted_buys_nothing(server: Server) -> None:
    assert server.push(MIB, "stranger") == 413
    assert server.push(1000, "stranger") == 401


def test_a_chunked_request_without_a_key_takes_no_memory(server: Server) -> None:
    before = server.memory
    with server.connect() as connection:
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n{80 * MIB:x}\r\n"
        pour(connection, 80 * MIB, head)
        assert server.memory - before < 32


@pytest.mark.parametrize("head", ["GET /health HTTP/1.1\r\nX: ", "GET /"], ids=["header", "path"])
def test_endless_headers_take_no_memory(server: Server, head: str) -> None:
    before = server.memory
    with server.connect() as connection, suppress(OSError):
        connection.sendall(head.encode())
        for _ in range(64):
            connection.sendall(b"a" * MIB)
    assert server.memory - before < 24


def test_endless_trailers_take_no_memory(server: Server) -> None:
    before = server.memory
    with server.connect() as connection, suppress(OSError):
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "
        connection.sendall(head.encode())
        for _ in range(64):
            connection.sendall(b"a" * MIB)
    assert server.memory - before < 24


@pytest.mark.parametrize("shakes_hands", [False, True])
def test_silent_connections_keep_nobody_out(server: Server, shakes_hands: bool) -> None:
    before, held = server.connections, server.memory
    with ExitStack() as stack:
        for _ in range(300):
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", server.port), 20)
                if shakes_hands:
                    connection = server.connect()
                stack.enter_context(connection)
        assert server.is_well()
        assert server.connections - before < 100
        assert server.memory - held < 64


def test_who_does_not_come_to_the_point_is_disconnected(server: Server) -> None:
    """Who says nothing, half of a head, half of a body, or one letter after the other, which does not extend the time."""
    heads = ["", "GET /health HT", post(1000) + "half of"]
    with ThreadPoolExecutor(5) as pool:
        waits = [pool.submit(lasts, server, head, "") for head in heads]
        waits.append(pool.submit(lasts, server, "GET /health HTTP/1.1\r\nA: ", "a"))
        waits.append(pool.submit(lasts, server, post(1000), "a"))
        for wait in waits:
            assert 5 < wait.result() < 20


def lasts(server: Server, head: str, letter: str) -> float:
    """Seconds until a connection ends on which a head is sent, and then a letter twice a second."""
    with server.connect() as connection:
        start = time.monotonic()
        connection.settimeout(0.5)
        with suppress(ConnectionError, ssl.SSLError):
            connection.sendall(head.encode())
            while time.monotonic() - start < 40:
                with suppress(TimeoutError):
                    if not connection.recv(1000):
                        break
                connection.sendall(letter.encode())
        return time.monotonic() - start


def test_messages_of_a_node_are_as_large_as_ever(server: Server) -> None:
    """Flower trips over a run that is none, as it can only do with a message that it has read."""
    assert server.push(100 * MIB) == server.push(100) == 500
