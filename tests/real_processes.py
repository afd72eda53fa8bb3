"""Federations of real processes on loopback: a server, nodes, and what a person would type beside them.

Every process has a session of its own and writes to a file of its own. All waits are bounded, and `Processes.end` leaves
nothing behind, whatever happened before.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from warm_processes import Started

from fedprompt.core import wire
from fedprompt.errors import FedpromptError
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

LONGEST = 240.0  # seconds for anything that has to happen, on a machine that is busy with other things
TAIL = 60  # lines of a log that are shown where a test failed
PAUSE = 0.1
CLASSES = ["disc", "square", "triangle", "cross", "bars"]  # of the tiny set, in its order
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Process:
    """`python ARGUMENTS` with a log file."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str], more: Mapping[str, str]) -> None:
        """`more` is added to its environment."""
        self.name, self.log = name, folder / f"{name}.log"
        environment = {**os.environ, **ENVIRONMENT, "FEDPROMPT_CACHE": str(folder / "cache"), **more}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_interruptible,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def words(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def tail(self) -> str:
        return "\n".join(self.words.splitlines()[-TAIL:])

    def wait_for(self, text: str, longest: float = LONGEST) -> None:
        """Until the log says so; a process that ends first is a failure."""

        def said() -> bool:
            return text in self.words

        until(lambda: said() or not self.running, f"{self.name} says {text!r}", longest)
        assert said(), f"{self.name} ended with {self._process.poll()} before it said {text!r}:\n{self.tail}"

    def end(self, longest: float = LONGEST) -> int:
        """Wait until it ends by itself; its exit code."""
        until(lambda: not self.running, f"{self.name} ends", longest)
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to it and to the rest of its session."""
        for member in self._members():
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self._process.wait(LONGEST)

    def _members(self) -> list[int]:
        """The processes of its session that are alive."""
        return [pid for pid, session in _sessions() if session == self.pid]

    def stop(self) -> None:
        """End it as a person would, or else by force."""
        if self.running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        self.kill()

    @property
    def working(self) -> bool:
        """Whether a node has taken an order that it has not answered yet."""
        words = self.words
        return words.count("begins: ") > words.count("ends: ")


class Processes:
    """All processes of one test, or of several that share them."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self._environment = folder, environment or {}
        self.started: list[Process] = []

    def start(self, name: str, *arguments: str) -> Process:
        """`fedprompt ARGUMENTS`."""
        return self.python(name, "-m", "fedprompt.cli", *arguments)

    def python(self, name: str, *arguments: str) -> Process:
        process = Process(self.folder, f"{len(self.started):02}-{name}", arguments, self._environment)
        self.started.append(process)
        return process

    def call(self, *arguments: str) -> tuple[int, str]:
        """`fedprompt ARGUMENTS` until it ends: its exit code and what it said. It is forked from a warm process."""
        more = {**ENVIRONMENT, "FEDPROMPT_CACHE": str(self.folder / "cache"), **self._environment}
        ended = Started(self.folder, arguments, **more).end()
        assert ended.code is not None
        return ended.code, ended.words

    def end(self) -> None:
        for process in reversed(self.started):
            process.stop()


class Federation(Processes):
    """A server and its sites, as `federate init` makes them."""

    def __init__(
        self, folder: Path, sites: Sequence[str], secure: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(folder, environment)
        self.address = f"127.0.0.1:{free_port()}"
        self._servers: list[Process] = []
        self._insecure = () if secure else ("--insecure",)
        named = [word for site in sites for word in ("--site", site)]
        code, words = self.call("federate", "init", "fed", "--address", self.address, *named, *self._insecure)
        assert code == 0, words
        self.folder_of_server = folder / "fed" / "server"
        for site in sites:  # which are compared with clients of one machine
            self.set_policy(site, evaluate="all", least_count=1)

    def folder_of(self, site: str) -> Path:
        return self.folder / "fed" / "sites" / site

    def set_policy(self, site: str, **settings: Any) -> None:
        (self.folder_of(site) / "policy.yaml").write_text(yaml.safe_dump(settings))

    def serve(self, ready: bool = True) -> Process:
        """The server, once sites can come."""
        server = self.start("server", "server", "fed/server", *self._insecure)
        self._servers.append(server)
        if ready:
            server.wait_for("ready at")
        return server

    def node(self, site: str, data: str | Path, *more: str) -> Process:
        own = ("--site", f"fed/sites/{site}", "--data", str(data), *self._insecure)
        return self.start(f"node-{site}", "node", *own, *more)

    def submit(self, settings: Mapping[str, Any], *more: str) -> Process:
        """`federate run` of a config, under way."""
        file = self.folder / f"{settings['name']}.yaml"
        file.write_text(yaml.safe_dump(dict(settings)))
        return self.start(f"run-{settings['name']}", "federate", "run", file.name, "--server", "fed/server", *more)

    def run(self, settings: Mapping[str, Any], *more: str, longest: float = 3 * LONGEST) -> Run:
        """`federate run` until it ends well."""
        process = self.submit(settings, *more)
        code = process.end(longest)
        assert code == 0, f"{process.name} ended with {code}:\n{process.tail}"
        return self.result(settings)

    def result(self, settings: Mapping[str, Any]) -> Run:
        (directory,) = self.folder_of_server.glob(f"runs/{settings['name']}-*")
        return Run(directory)

    def status(self) -> dict[str, list[dict[str, Any]]]:
        code, words = self.call("federate", "status", "--server", "fed/server", "--json")
        assert code == 0, words
        found: dict[str, list[dict[str, Any]]] = json.loads(words)
        return found

    def kill_server(self) -> None:
        """SIGKILL to the server and to all that it started, some of it in sessions of its own."""
        for pid in self.processes_of_server():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        super().end()
        self.kill_server()

    def processes_of_server(self) -> list[int]:
        """Servers of this folder that live, and whatever they started, directly or not."""
        mark = f"FEDPROMPT_SERVER={self.folder_of_server}\0".encode()
        first = {server.pid for server in self._servers if server.running}  # whose own environment is older than that
        marked = (pid for pid, _ in _sessions() if mark in _about(pid, "environ") and not _is_command_of_flower(pid))
        return [*first, *marked]

    def rounds(self, settings: Mapping[str, Any]) -> int:
        """The number of the last round that is committed; -1 before there is a run file."""
        try:
            run = self.result(settings)
        except (FedpromptError, ValueError):  # the file is being made
            return -1
        try:
            return max((record.round for record in run.rounds()), default=-1)
        finally:
            run.close()

    def wait_for_round(self, settings: Mapping[str, Any], round: int, longest: float = 2 * LONGEST) -> None:
        until(lambda: self.rounds(settings) >= round, f"round {round} of {settings['name']} is committed", longest)

    def own_file(self, site: str, run: Run) -> Path:
        """Where a site keeps what the run file knows of it only by number."""
        client = list(run.clients).index(site)
        blob = run.reader.client_state(client)
        assert blob is not None, f"{site} has never taken part"
        number = int(wire.decode(blob)["kept_as"])
        return (
            self.folder_of(site)
            / "state"
            / "states"
            / run.reader.fact("run_id")
            / str(client)
            / f"{number}.safetensors"
        )

    def own_tensors(self, site: str, run: Run) -> Tensors:
        """What a site keeps to itself."""
        return wire.decode(self.own_file(site, run).read_bytes())


def tiny(name: str, method: str = "pfedbayespt", **changes: Any) -> dict[str, Any]:
    """A small experiment as a plain mapping; keyword arguments update its sections."""
    values: dict[str, Any] = {
        "name": name,
        "data": {"source": "tiny", "train_per_cell": 4, "test_per_cell": 2, "classes": CLASSES},
        "partition": {"scheme": "domains", "clients": 4},
        "backbone": {"name": "tiny"},
        "method": {"name": method},
        "train": {"lr": 0.05, "batch_size": 8},
        "federation": {"rounds": 3},
        "engine": {"deadline": 120.0, "patience": 90.0},
        "output": {"threads": 1},
    }
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change}
    return values


def split(processes: Processes, settings: Mapping[str, Any], output: str = "split") -> dict[str, Path]:
    """The parquet file of every client."""
    file = processes.folder / f"{output}.yaml"
    file.write_text(yaml.safe_dump(dict(settings)))
    code, words = processes.call("federate", "split", file.name, "--output", output)
    assert code == 0, words
    return {path.stem: path for path in sorted((processes.folder / output).glob("*.parquet"))}


def until(holds: Callable[[], bool], what: str, longest: float = LONGEST) -> None:
    """Wait for something, but not for ever."""
    end = time.monotonic() + longest
    while not holds():
        assert time.monotonic() < end, f"within {longest:g} s it must come to pass that {what}"
        time.sleep(PAUSE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _interruptible() -> None:
    """Ctrl-C counts, also where these tests were started in the background of a shell, which has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _sessions() -> Iterable[tuple[int, int]]:
    """Every process that is not dead yet and the session it belongs to."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if state != "Z":
            yield int(entry.name), int(session)


def _is_command_of_flower(pid: int) -> bool:
    """Whether a process is `flwr ...`, which is started by a user of a server and has the server's folder in its environment."""
    return any(Path(word).name == "flwr" for word in _about(pid, "cmdline").decode().split("\0")[:2])


def _about(pid: int, what: str) -> bytes:
    """A file of /proc on a process; nothing where it has just ended."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""
