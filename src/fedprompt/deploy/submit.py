"""`fedprompt federate run` and `status`: runs on a server, through Flower's `flwr`.

Flower receives an app without code: it names parts of the installed fedprompt and contains the config as text.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from fedprompt import __version__
from fedprompt.deploy import membership
from fedprompt.deploy.flower_cli import ask, check_installed, environment, program
from fedprompt.deploy.folders import CONNECTION, ServerFolder, toml_text
from fedprompt.errors import ConfigError, RunError, broken, named
from fedprompt.io.safe_text import safe_line

if TYPE_CHECKING:
    from fedprompt.engines.flower.node_registry import Node

APP = "fedprompt.deploy.server_app"
LARGEST_CONFIG = 2**20  # characters
LOOK = 15.0  # seconds between checks of a run whose log is followed
PAUSE = 2.0  # seconds between checks of a run whose log has ended
FINISHED = "finished"
COMPLETED, STOPPED = "finished:completed", "finished:stopped"
NOTHING = "N/A"  # how `flwr` writes it

_ERROR = re.compile(r"(?:ServerApp failed with exception: )?(?P<name>[A-Za-z]+): (?P<message>.*)", re.DOTALL)


@dataclass(frozen=True)
class Submitted:
    """A run that the server has accepted."""

    run_id: int


@dataclass(frozen=True)
class RunState:
    """The state of a run."""

    run_id: int
    status: str
    """Pending, starting, running, finished:completed, finished:failed or finished:stopped."""
    details: str
    """Why it failed."""
    pending_at: str
    running_at: str
    """Empty before it ends."""
    finished_at: str

    @property
    def finished(self) -> bool:
        return self.status.startswith(FINISHED)

    def check(self) -> None:
        """Raise the error of a failed run with its type on the server."""
        if not self.finished or self.status == COMPLETED:
            return
        if self.status == STOPPED:
            raise RunError(f"run {self.run_id} was stopped; continue it with --resume")
        match = _ERROR.fullmatch(self.details)
        kind = named(match["name"]) if match else None
        if match and kind is not None:
            raise kind(match["message"])
        raise RunError(f"run {self.run_id} failed on the server: {self.details or 'see its log'}")


@dataclass(frozen=True)
class Status:
    """The nodes, and the runs with the latest first."""

    nodes: list[Node]
    runs: list[RunState]


def submit(folder: ServerFolder, config_json: str, resume: bool = False) -> Submitted:
    """Submit a config to the server, which starts it immediately."""
    if len(config_json) > LARGEST_CONFIG:
        raise ConfigError(broken("config", f"have at most {LARGEST_CONFIG} characters", len(config_json)))
    with tempfile.TemporaryDirectory() as scratch:
        app = Path(scratch) / "fedprompt-run"
        app.mkdir()
        (app / "pyproject.toml").write_text(app_text(config_json, resume), encoding="utf-8")
        answer = ask(folder, "run", str(app), CONNECTION)
    return Submitted(int(answer["run-id"]))


def follow(folder: ServerFolder, run_id: int) -> RunState:
    """Print the log of a run until it ends; returns its final state."""
    check_installed()
    command = [program("flwr"), "log", str(run_id), CONNECTION, "--stream"]
    log = subprocess.Popen(
        command,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert log.stdout is not None
    reader = Thread(target=copy_safely, args=(log.stdout, sys.stdout), daemon=True)
    reader.start()
    try:
        while not _ended(log, LOOK):
            if state(folder, run_id).finished and not _ended(log, LOOK):
                break  # a log that hangs
    finally:
        log.kill()
        log.wait()
        reader.join(PAUSE)
    return _settled(folder, run_id)


def copy_safely(log: BinaryIO, shown: TextIO) -> None:
    """Lines of a log as they arrive, made safe for a terminal: they may contain text of sites and configs."""
    for line in log:
        shown.write(safe_line(line.decode("utf-8", "replace").rstrip("\r\n")) + "\n")
        shown.flush()


def stop(folder: ServerFolder, run_id: int) -> None:
    """Stop a run; its finished rounds are kept."""
    ask(folder, "stop", str(run_id), CONNECTION)


def state(folder: ServerFolder, run_id: int) -> RunState:
    """The state of one run."""
    return _state(ask(folder, "list", CONNECTION, "--run-id", str(run_id))["runs"][0])


def status(folder: ServerFolder) -> Status:
    """Nodes and runs of the server."""
    return Status(membership.nodes(folder), [_state(each) for each in ask(folder, "list", CONNECTION)["runs"]])


def _ended(process: subprocess.Popen[bytes], patience: float) -> bool:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        return False
    return True


def _settled(folder: ServerFolder, run_id: int) -> RunState:
    """Wait for the final state of a run whose log has ended; the log may end before the run."""
    while not (found := state(folder, run_id)).finished:
        time.sleep(PAUSE)
    return found


def _state(values: dict[str, Any]) -> RunState:
    fields = ("status", "status-details", "pending-at", "running-at", "finished-at")
    return RunState(int(values["run-id"]), *("" if values[each] == NOTHING else str(values[each]) for each in fields))


def app_text(config_json: str, resume: bool) -> str:
    """The only file of an app without code."""
    return "\n".join(
        [
            "[project]",
            'name = "fedprompt-run"',
            f"version = {toml_text(__version__)}",
            'description = "A run of fedprompt, which is installed where it runs"',
            'license = "Apache-2.0"',
            "dependencies = []",
            "[tool.flwr.app]",
            'publisher = "fedprompt"',
            "[tool.flwr.app.components]",
            f'serverapp = "{APP}:server_app"',
            f'clientapp = "{APP}:client_app"',
            "[tool.flwr.app.config]",
            f"config = {toml_text(config_json)}",
            f"resume = {str(resume).lower()}",
            "",
        ]
    )
