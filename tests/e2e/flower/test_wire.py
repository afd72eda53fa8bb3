"""Issue 7, what goes over a node's line: every byte of it is recorded, which takes a federation without TLS and a relay.

    node ── relay ── server        all of them on loopback; and a proxy for the rest of the world, which nobody must ask

The same run shows that a site has one message for each round, and that nobody phones home although nobody was told not to.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from real_processes import Federation, Process, split, tiny, until
from recording import body, encoded_images, pixels, raw, windows
from support import shared_tensors

from fedprompt.runs.run import Run

SITES = ("client_0", "client_1")
ROUNDS = 3
LOUD = {"FLWR_TELEMETRY_ENABLED": "1", "FLWR_DISABLE_UPDATE_CHECK": "0", "RAY_USAGE_STATS_ENABLED": "1"}
pytestmark = pytest.mark.timeout(900)


@dataclass
class Relay:
    """Hands bytes on between whoever connects to it and the port of a server; a copy of them by connection."""

    target: int | None  # nobody where there is none: who connects is sent away
    up: list[bytearray] = field(default_factory=list)
    down: list[bytearray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self.up.append(bytearray())
        self.down.append(bytearray())
        up, down = self.up[-1], self.down[-1]
        if self.target is None:
            with near, suppress(OSError):
                up += near.recv(2**16)
            return
        with suppress(OSError):
            far = socket.create_connection(("127.0.0.1", self.target))
            Thread(target=_pass_on, args=(far, near, down), daemon=True).start()
            _pass_on(near, far, up)


def _pass_on(source: socket.socket, sink: socket.socket, copy: bytearray) -> None:
    with suppress(OSError):
        while part := source.recv(2**16):
            copy += part
            sink.sendall(part)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@dataclass
class Recorded:
    """A run, all that went over the lines of its nodes, and what they kept while it was on."""

    run: Run
    federation: Federation
    data: dict[str, Path]
    nodes: list[Process]
    up: bytes
    down: bytes
    states: dict[Path, bytes]  # all that a site ever kept of its own tensors
    asked: list[bytes]  # what the proxy was asked for


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, found_federation: Any) -> Iterator[Recorded]:
    folder, world = tmp_path_factory.mktemp("wire"), Relay(None)
    near = "127.0.0.1,localhost"
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{world.port}")
    environment = {**LOUD, **proxy, "NO_PROXY": near, "no_proxy": near, "HOME": str(folder / "home")}
    federation: Federation = found_federation(folder, SITES, secure=False, environment=environment)
    settings = tiny("wire", partition={"scheme": "iid", "clients": len(SITES)}, federation={"rounds": ROUNDS})
    data = split(federation, settings)
    federation.serve()
    relay = Relay(int(federation.address.rpartition(":")[2]))
    nodes = [
        federation.start(
            f"node-{site}",
            *f"node --insecure --server 127.0.0.1:{relay.port} --name {site} --data {data[site]}".split(),
            *("--state", str(federation.folder_of(site) / "state")),
        )
        for site in SITES
    ]
    submitted = federation.submit(settings)
    states = _states_on_the_way(federation, submitted)
    assert submitted.end() == 0, submitted.tail
    federation.status()
    up, down = (b"|".join(bytes(each) for each in side) for side in (relay.up, relay.down))
    run = federation.result(settings)
    yield Recorded(run, federation, data, nodes, up, down, states, [bytes(each) for each in world.up])
    for each in (relay, world):
        each.close()


def _states_on_the_way(federation: Federation, run: Process) -> dict[Path, bytes]:
    """Every state that a site kept while the run was on; some are gone a round later."""
    seen: dict[Path, bytes] = {}

    def forward() -> bool:
        for site in SITES:
            for file in federation.folder_of(site).glob("state/states/*/*/*.safetensors"):
                if file not in seen:
                    with suppress(OSError):  # gone a moment later
                        seen[file] = file.read_bytes()
        return not run.running

    until(forward, "the run ends", 300)
    return seen


def test_nothing_private_passes_a_nodes_line(recorded: Recorded) -> None:
    caches = [
        file.read_bytes()
        for site in SITES
        for file in recorded.federation.folder_of(site).glob("state/cache/**/*")
        if file.is_file()
    ]
    assert len(recorded.states) >= len(SITES) * 2, "states of several rounds"
    assert windows(raw(shared_tensors(recorded.run)))[0] in recorded.down, "the search finds what went down"
    assert recorded.up.count(b"fedprompt-reply-1") == len(SITES) * ROUNDS, "and what went up, which is not compressed"
    private = {
        "what a site keeps": windows(map(body, recorded.states.values())),
        "what a site has cached": windows(caches),
        "an image as it is stored": windows(encoded_images(recorded.data.values())),
        "an image as it is seen": windows(pixels(recorded.data.values())),
    }
    for what, pieces in private.items():
        assert len(pieces) > 10, what
        for side in ("up", "down"):
            content = getattr(recorded, side)
            assert not [piece for piece in pieces if piece in content], f"{what} went {side}"
    for file in recorded.data.values():
        assert str(file).encode() not in recorded.up, "not even where the images are"


def test_a_site_has_one_message_for_each_round(recorded: Recorded) -> None:
    """Its introductions, one order for the evaluation of each round and the training of the next, and the last evaluation."""
    expected = ["training of round 1"]
    expected += [f"evaluation of round {round}, training of round {round + 1}" for round in range(1, ROUNDS)]
    expected += [f"evaluation of round {ROUNDS}"]
    for node in recorded.nodes:
        done = re.findall(r"begins: (.*)", node.words)
        assert [each for each in done if each != "introduction"] == expected
    assert recorded.down.count(b'"kind": "work"') == len(SITES) * (ROUNDS + 1)


def test_nobody_phones_home(recorded: Recorded) -> None:
    assert recorded.asked == []


def test_flower_would_phone_home_by_itself(tmp_path: Path) -> None:
    """So the proxy of the other test would have been asked."""
    world = Relay(None)
    proxy = {"https_proxy": f"http://127.0.0.1:{world.port}", "HOME": str(tmp_path), **LOUD}
    code = "from flwr.supercore.telemetry import EventType, event; event(EventType.PING).result()"
    subprocess.run([sys.executable, "-c", code], env={"PATH": "", **proxy}, check=True, timeout=120)
    until(lambda: any(world.up), "somebody asks")
    assert world.up[0].startswith(b"CONNECT telemetry.flower.ai:443")
    world.close()


def test_a_node_writes_to_its_state_directory_alone(recorded: Recorded) -> None:
    """Flower's own notes included, which it would leave in the home directory of whoever started the node."""
    assert not [file for file in (recorded.federation.folder / "home").rglob("*") if file.is_file()]
