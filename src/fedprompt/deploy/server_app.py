"""What the SuperLink starts for a run: fedprompt's own loop over Flower's grid.

The app that travels has no code, only these two names and the config. Nodes of fedprompt do not start the second one: they do
their tasks themselves (`supernode.py`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from threading import Thread

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedprompt.deploy.flower_cli import FOLDER
from fedprompt.deploy.folders import ServerFolder
from fedprompt.deploy.lockfile import claimant, is_alive
from fedprompt.engines.flower.transport import SitesByGrid
from fedprompt.errors import FedpromptError, RunError
from fedprompt.io.bounded_read import strict_json
from fedprompt.io.safe_text import safe_line

WATCH = 0.5  # seconds between two looks at it

server_app = ServerApp()
client_app = ClientApp()


class RunFailed(Exception):
    """What Flower is told of an error: its name, and what it says."""


class Plainly(logging.Filter):
    """What fedprompt found wrong by itself is one line of the log: no traceback, nor what an exit code of Flower's means."""

    known = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RunFailed):
            self.known = True
            record.msg, record.args, record.exc_info = safe_line(str(error)), (), None
        return not (self.known and record.getMessage().startswith("Exit Code"))


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """One run, from its first missing round to its last."""
    logging.getLogger("flwr").addFilter(Plainly())
    try:
        _federate(grid, str(context.run_config["config"]), bool(context.run_config["resume"]))
    except FedpromptError as error:
        raise RunFailed(f"{type(error).__name__}: {error}") from error


@client_app.train()
def refuse(message: Message, context: Context) -> Message:
    raise RunError("nodes of this federation are started with `fedprompt node`")


def _end_with(server: int) -> None:
    """End this process as soon as the server's has ended, however that was. Flower would first try to tell the server."""

    def watch() -> None:
        while is_alive(server):
            time.sleep(WATCH)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _federate(grid: Grid, config: str, resume: bool) -> None:
    from rich.console import Console

    from fedprompt.experiment.progress import LiveProgress
    from fedprompt.experiment.sites import SitesExperiment

    folder = ServerFolder.load(Path(os.environ[FOLDER]))
    _end_with(claimant(folder.path))  # not with who started this: what a killed server left behind serves the next one
    values = strict_json(config)
    values["output"] = {**values.get("output", {}), "directory": str(folder.runs)}
    experiment = SitesExperiment(values)
    engine = experiment.config.engine
    post = SitesByGrid(grid, engine.deadline, engine.patience, trusting=not folder.secure)
    progress = LiveProgress(Console(file=sys.stdout, force_terminal=False, width=200))
    try:
        experiment.federate(post, resume, progress)
    finally:
        progress.stop()
