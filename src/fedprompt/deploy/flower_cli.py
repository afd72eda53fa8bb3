"""Calls of Flower's own programs: their environment, their answers, and their failures as our errors."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedprompt.deploy.expiry import check, of_server, why_silent
from fedprompt.deploy.folders import ServerFolder
from fedprompt.errors import ConfigError, FedpromptError, RunError
from fedprompt.io.bounded_read import strict_json

FOLDER = "FEDPROMPT_SERVER"  # the environment variable with the server's folder, for the processes that Flower starts for a run
PATIENCE = 300.0  # seconds for one call of `flwr`, which takes two, or a hundred on a busy machine
UNREACHABLE = "Connection to the SuperLink is unavailable"  # the message of `flwr`


def check_installed() -> None:
    """Raise unless Flower is installed."""
    if find_spec("flwr") is None:
        raise ConfigError("a federation across machines needs Flower: pip install 'fedprompt[flower]'")


def environment(folder: ServerFolder) -> dict[str, str]:
    """The environment of this process, adapted for Flower's programs on the server's machine.

    They send no telemetry, call the server without a proxy, and find each other on the path.
    """
    from fedprompt.engines.flower import SILENT

    beside = str(Path(sys.executable).parent)
    direct = [each for name in ("NO_PROXY", "no_proxy") for each in os.environ.get(name, "").split(",") if each]
    unproxied = ",".join(dict.fromkeys([*direct, "localhost", "127.0.0.1", "::1", folder.address.host]))
    return {
        **os.environ,
        **SILENT,
        "FLWR_HOME": str(folder.flower_home),
        FOLDER: str(folder.path),
        "NO_PROXY": unproxied,
        "no_proxy": unproxied,
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
    }


def program(name: str) -> str:
    """The path of a Flower program, next to this interpreter."""
    return str(Path(sys.executable).parent / name)


def ask(folder: ServerFolder, *arguments: str, patience: float = PATIENCE) -> dict[str, Any]:
    """The answer of `flwr ARGUMENTS --format json`; RunError if it reports a failure."""
    check_installed()
    check(of_server(folder))
    command = [program("flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(folder), timeout=patience, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"`flwr {arguments[0]}` gave no answer within {patience:g} s") from None
    try:
        answer = strict_json(done.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        output = (done.stderr or done.stdout).strip()[-1000:]
        raise RunError(f"`flwr {arguments[0]}` failed with exit code {done.returncode}: {output}")
    if not answer.get("success"):
        raise failure(folder, str(answer.get("error-message", answer)))
    return answer


def failure(folder: ServerFolder, message: str) -> FedpromptError:
    """The error for a message of `flwr`."""
    if UNREACHABLE in message:
        return no_server(folder)
    reason = message.strip().rpartition("\n\n")[2]  # progress lines come first
    return RunError(f"Flower: {reason[-1000:]}")


def no_server(folder: ServerFolder) -> FedpromptError:
    """The error for a server that does not answer."""
    return why_silent(folder) or RunError(
        f"no server at {folder.address}; start it with `fedprompt server {folder.path}`"
    )
