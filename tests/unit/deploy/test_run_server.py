"""What the server is started with, and what keeps it from starting; then a real one on loopback."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from fedprompt.deploy import certificates, membership, submit
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.folders import ServerFolder, SiteFolder, init
from fedprompt.deploy.health import answers
from fedprompt.deploy.run_server import check_insecure, start, superlink_arguments
from fedprompt.deploy.status import standing
from fedprompt.errors import ConfigError, RunError

SERVE = "import sys; from pathlib import Path; from fedprompt.deploy import folders, run_server as server; "
SERVE += "server.start(folders.ServerFolder.load(Path(sys.argv[1])), insecure=bool(sys.argv[2]))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(folder: ServerFolder, insecure: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The server in a process of its own, once it says that it is ready."""
    command = [sys.executable, "-c", SERVE, str(folder.path), "yes" if insecure else ""]
    log = (folder.path.parent / "log").open("a+")
    process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 60
        while " INFO ready at" not in (said := Path(log.name).read_text()):
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(30)
        log.close()
        Path(log.name).unlink()


@pytest.mark.unit
def test_a_secure_server_has_tls_and_knows_its_nodes(tmp_path: Path) -> None:
    folder = init(tmp_path / "fed", Address("fed.example.org", 9092), ["a"])
    arguments = superlink_arguments(folder, Address("0.0.0.0", 9092))
    assert {"--enable-supernode-auth", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"} <= set(arguments)
    assert "--disable-runtime-dependency-installation" in arguments
    assert "--insecure" not in arguments
    assert arguments[:4] == ["--host", "0.0.0.0", "--port", "9092"]


@pytest.mark.unit
def test_insecure_takes_the_folder_the_address_and_the_person(tmp_path: Path) -> None:
    local, wide = Address("127.0.0.1", 9092), Address("0.0.0.0", 9092)
    secure, insecure = init(tmp_path / "s", local, ["a"]), init(tmp_path / "i", local, ["a"], secure=False)
    check_insecure(insecure, local, True)
    check_insecure(secure, wide, False)
    with pytest.raises(ConfigError, match="--insecure must be absent for a federation with certificates"):
        check_insecure(secure, local, True)
    with pytest.raises(ConfigError, match="--insecure must be given for a federation without certificates"):
        check_insecure(insecure, local, False)
    with pytest.raises(ConfigError, match=r"bind must be a loopback address .*, got '0\.0\.0\.0:9092'"):
        check_insecure(insecure, wide, True)
    assert "--insecure" in superlink_arguments(insecure, local)


@pytest.mark.unit
def test_a_server_that_would_not_know_its_own_certificate_does_not_start(tmp_path: Path) -> None:
    folder = init(tmp_path / "fed", Address("fed.example.org", 9092), ["a"])
    with pytest.raises(
        ConfigError, match=r"bind must be 0\.0\.0\.0, .* \(fed\.example\.org\), got '192\.0\.2\.1:9092'"
    ):
        start(folder, Address("192.0.2.1", 9092))


@pytest.mark.unit
def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        folder = init(tmp_path / "fed", Address("127.0.0.1", taken.getsockname()[1]), ["a"])
        with pytest.raises(RunError, match=r"bind must be free to listen on \(Address already in use\), got '127"):
            start(folder)


@pytest.mark.e2e_flower
def test_a_real_server_lets_in_who_is_in_keys_and_remembers_them(tmp_path: Path) -> None:
    folder = init(tmp_path / "fed", Address("localhost", free_port()), ["a", "b"])
    late = SiteFolder.create(tmp_path / "c", "c", folder)
    with serving(folder) as process:
        first = {node.name: node.id for node in submit.status(folder).nodes}
        membership.admit(folder, "c", late.public_key)
        membership.expel(folder, "a")
        assert [node.name for node in membership.nodes(folder)] == ["b", "c"]
        with pytest.raises(RunError, match="the key of a must be one that was never expelled"):
            membership.admit(folder, "a", tmp_path / "fed" / "sites" / "a" / "key.pub")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    membership.expel(folder, "c")
    with serving(folder) as process:
        assert {node.name: node.id for node in membership.nodes(folder)} == {"b": first["b"]}
        process.kill()


@pytest.mark.e2e_flower
def test_a_real_server_keeps_strangers_from_all_but_the_routes_of_nodes(tmp_path: Path) -> None:
    folder = init(tmp_path / "fed", Address("localhost", free_port()), ["a"])
    context = ssl.create_default_context(cafile=folder.ca_certificate)
    tricks = [
        "/v1/control/start-run",
        "//v1/control/start-run",
        "/v1/fleet/../control/start-run",
        "/docs",
        "/openapi.json",
    ]
    tricks += ["/v1/fleet/%2e%2e/control/start-run", "/v1/fleet%2F..%2Fcontrol/start-run", "/v1/runtime/acquire-task"]
    with serving(folder):
        found = {}
        for path in [*tricks, "/health", "/v1/fleet/pull-messages"]:
            connection = http.client.HTTPSConnection("localhost", folder.address.port, timeout=10, context=context)
            connection.request("POST", path, headers={"X-Forwarded-For": "127.0.0.1"})
            found[path] = connection.getresponse().status
            connection.close()
    assert {path: found[path] for path in tricks} == dict.fromkeys(tricks, 403)
    assert found["/health"] == 405
    assert found["/v1/fleet/pull-messages"] in (400, 401, 415)


@pytest.mark.e2e_flower
def test_a_flood_of_large_requests_without_a_key_takes_no_memory_of_a_real_server(tmp_path: Path) -> None:
    """Six connections of 120 MiB each, held open, and an operator who gets an answer meanwhile."""
    folder = init(tmp_path / "fed", Address("localhost", free_port()), ["a"])
    context = ssl.create_default_context(cafile=folder.ca_certificate)
    piece, pieces = bytes(2**20), 120
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\nContent-Length: {pieces * 2**20 + 1}\r\n"
    with serving(folder) as process, ExitStack() as held:
        assert answers(folder)
        before = _memory(process.pid)

        def flood(number: int) -> None:
            plain = socket.create_connection(("localhost", folder.address.port), 20)
            connection = held.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
            origin = f"X-Forwarded-For: 192.0.2.{number}\r\n" if number % 2 else ""
            with suppress(OSError):
                connection.sendall(f"{head}{origin}\r\n".encode())
                for _ in range(pieces):
                    connection.sendall(piece)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(flood, range(6)))
        assert answers(folder)
        assert _memory(process.pid) - before < 64


def _memory(pid: int) -> float:
    """MiB in use by a process and those it has started."""
    own = Path(f"/proc/{pid}/smaps_rollup").read_text().split("Rss:")[1].split()[0]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(own) / 1024 + sum(_memory(int(child)) for child in children)


@pytest.mark.e2e_flower
def test_a_real_server_says_that_its_certificate_expires_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "EARLIER", timedelta(days=certificates.SERVER_DAYS - 30))
    folder = init(tmp_path / "fed", Address("localhost", free_port()), ["a"])
    with serving(folder):
        said = (folder.path.parent / "log").read_text()
        assert f"WARNING the server's certificate ({folder.certificate}) expires on" in said
        assert standing(folder)["certificates"][0]["days"] == 29
