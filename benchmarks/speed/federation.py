"""What a round costs when clients are sites: real server and nodes on loopback, without TLS, against two alternatives.

The same run (configs/federation.yaml, more rounds of one evaluation each) is made four times:

    in process      `fedprompt run`
    simulation      `engine.kind: flower-simulation`, with as many processes of Ray as there are sites
    nodes           `fedprompt server` and a `fedprompt node` for each site
    process each    the same, but with Flower's own way of doing tasks: `flower-supernode` starts a process for every message,
                    which imports torch, loads the backbone and opens the images, and then does what a node of ours does

Every client computes with one thread. Reported are the median seconds of a round, of all but the first two (which meet the
sites and fill the caches), and the price of the distance: what a round takes longer than a site's share of the in-process
round, which does one site after the other. So sites should have a core each. Run alone, on a machine that does nothing else:

    python benchmarks/speed/federation.py [--rounds 8] [--clients 2] [--output benchmarks/speed/federation.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/federation.yaml"  # of the package
BIN = Path(sys.executable).parent
WARM = 2  # rounds that are left out
PATIENCE = 900.0
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]),
}
PER_MESSAGE = '''"""Flower's own way: this module is loaded in a new process for every message."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedprompt.engines.flower.transport import answered, order_in
from fedprompt.engines.remote.node import Site

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    own = context.node_config
    site = Site(str(own["name"]), str(own["data"]), Path(str(own["state"])))
    return answered(message, site.answer(order_in(message)))
'''


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds of a round of sites, against alternatives")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), arguments.rounds, arguments.clients)
    print(json.dumps(found, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measure(scratch: Path, rounds: int, clients: int) -> dict[str, Any]:
    overrides = [f"federation.rounds={rounds}", "federation.evaluate_every=1", f"partition.clients={clients}"]
    overrides += ["output.threads=1"]
    call("federate", "split", CONFIG, "--output", str(scratch / "split"), *overrides)
    here = [f"output.directory={scratch / 'here'}"]
    call("run", CONFIG, "--quiet", "name=here", *overrides, *here)
    call(
        "run",
        CONFIG,
        "--quiet",
        "name=ray",
        *overrides,
        *here,
        "engine.kind=flower-simulation",
        f"engine.workers={clients}",
    )
    sites = {path.stem: path for path in sorted((scratch / "split").glob("*.parquet"))}
    seconds = {
        "in process": of_rounds(scratch / "here", "here"),
        "simulation": of_rounds(scratch / "here", "ray"),
        "nodes": over_sites(scratch / "nodes", sites, overrides, each=False),
        "process each": over_sites(scratch / "each", sites, overrides, each=True),
    }
    medians = {name: statistics.median(found[WARM:]) for name, found in seconds.items()}
    return {
        "config": f"{CONFIG} {' '.join(overrides)}",
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("fedprompt", "torch", "flwr", "ray")},
        "seconds of every round": {name: [round(each, 3) for each in found] for name, found in seconds.items()},
        "median seconds of a round": {name: round(each, 3) for name, each in medians.items()},
        "price of the distance": {
            name: round(each - medians["in process"] / clients, 3)
            for name, each in medians.items()
            if name != "in process"
        },
        "process each / nodes": round(medians["process each"] / medians["nodes"], 2),
    }


def of_rounds(directory: Path, name: str) -> list[float]:
    """Seconds of every round of a run, all phases together."""
    from fedprompt.runs.run import Run

    (path,) = directory.glob(f"{name}-*")
    run = Run(path)
    try:
        return [sum(record.seconds.values()) for record in run.rounds() if record.round]
    finally:
        run.close()


def over_sites(scratch: Path, sites: dict[str, Path], overrides: Sequence[str], each: bool) -> list[float]:
    """The same over a real server and real nodes; with `each`, in a process for every message."""
    port = free_port()
    names = [argument for name in sites for argument in ("--site", name)]
    call("federate", "init", str(scratch), "--address", f"127.0.0.1:{port}", *names, "--insecure")
    with running("server", str(scratch / "server"), "--insecure", log=scratch / "server.log"):
        wait_for(scratch / "server.log", "ready at")
        with nodes(scratch, sites, port, each):
            if each:
                submit_with_code(scratch, sites, overrides)
            else:
                call("federate", "run", CONFIG, "--server", str(scratch / "server"), "name=sites", *overrides)
            return of_rounds(scratch / "server" / "runs", "sites")


@contextmanager
def nodes(scratch: Path, sites: dict[str, Path], port: int, each: bool) -> Iterator[None]:
    started = []
    try:
        for name, data in sites.items():
            state = scratch / "states" / name
            if each:
                own = f'name="{name}" data="{data}" state="{state}"'
                command = [str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}"]
                command += ["--port", str(free_port()), "--node-config", own]
            else:
                command = [str(BIN / "fedprompt"), "node", "--insecure", "--server", f"127.0.0.1:{port}"]
                command += ["--name", name, "--data", str(data), "--state", str(state)]
            log = (scratch / f"{name}.log").open("w")
            home = {**ENVIRONMENT, "FLWR_HOME": str(scratch / f"home-{name}")}
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=home))
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


def submit_with_code(scratch: Path, sites: dict[str, Path], overrides: Sequence[str]) -> None:
    """A run whose app carries the code that Flower starts for every message."""
    from fedprompt.config import config_files
    from fedprompt.deploy.flower_cli import environment
    from fedprompt.deploy.folders import ServerFolder
    from fedprompt.deploy.submit import app_text

    (config,) = config_files.load(CONFIG, [*overrides, "name=sites", "engine.kind=flower"])
    values = config.model_dump(mode="json")
    values["engine"]["sites"] = sorted(sites)
    app = scratch / "app"
    (app / "per_message").mkdir(parents=True)
    (app / "per_message" / "__init__.py").write_text("")
    (app / "per_message" / "app.py").write_text(PER_MESSAGE)
    text = app_text(json.dumps(values), False).replace(
        "fedprompt.deploy.server_app:client_app", "per_message.app:client_app"
    )
    (app / "pyproject.toml").write_text(text)
    folder = ServerFolder.load(scratch / "server")
    command = [str(BIN / "flwr"), "run", str(app), "fedprompt", "--stream"]
    subprocess.run(command, env={**ENVIRONMENT, **environment(folder)}, check=True, timeout=PATIENCE)


def call(*arguments: str) -> None:
    subprocess.run(
        [str(BIN / "fedprompt"), *arguments], env=ENVIRONMENT, check=True, timeout=PATIENCE, stdout=sys.stderr
    )


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[None]:
    with log.open("w") as stream:
        process = subprocess.Popen([str(BIN / "fedprompt"), *arguments], stdout=stream, stderr=stream, env=ENVIRONMENT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def wait_for(log: Path, text: str) -> None:
    end = time.monotonic() + 120
    while text not in log.read_text(errors="replace"):
        if time.monotonic() > end:
            raise SystemExit(f"{log} never said {text!r}")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
