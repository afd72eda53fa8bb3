"""The app that the SuperLink starts for a run: fedprompt's own loop over Flower's grid.

The submitted app has no code, only these two names and the config. Nodes of fedprompt do not start the client app: they
do their tasks themselves (`supernode.py`).
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
from fedprompt.deploy.lockfile import claimant, still_claimed
from fedprompt.engines.flower.transport import SitesByGrid
from fedprompt.errors import FedpromptError, RunError, command_line
from fedprompt.io.bounded_read import strict_json
from fedprompt.io.safe_text import safe_line

WATCH = 0.5  # seconds between two checks of the server's process

server_app = ServerApp()
client_app = ClientApp()


class RunFailed(Exception):
    """An error as Flower reports it: its name and its message."""


class Plainly(logging.Filter):
    """Logs an error of fedprompt as one line, without traceback and without Flower's explanation of exit codes."""

    failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RunFailed):
            self.failed = True
            record.msg, record.args, record.exc_info = safe_line(str(error)), (), None
        return not (self.failed and record.getMessage().startswith("Exit Code"))


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


def _end_with(folder: Path) -> None:
    """End this process when the server's process has ended for any reason. Flower would first try to contact the server."""

    server = claimant(folder)

    def watch() -> None:
        while still_claimed(folder, server):
            time.sleep(WATCH)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _federate(grid: Grid, config: str, resume: bool) -> None:
    from rich.console import Console

    from fedprompt.experiment.progress import LiveProgress
    from fedprompt.experiment.sites import SitesExperiment

    folder = ServerFolder.load(Path(os.environ[FOLDER]))
    _end_with(folder.path)  # not with the parent: processes left by a killed server work for the next one
    values = strict_json(config)
    values["output"] = {**values.get("output", {}), "directory": str(folder.runs)}
    experiment = SitesExperiment(values)
    engine = experiment.config.engine
    federation = experiment.config.federation
    late_rounds = federation.late_rounds if federation.staleness else 0
    post = SitesByGrid(grid, engine.deadline, engine.patience, not folder.secure, late_rounds)
    progress = LiveProgress(Console(file=sys.stdout, force_terminal=False, width=200))
    try:
        with command_line():  # its errors are read by who gave the command
            experiment.federate(post, resume, progress)
    finally:
        progress.stop()
