"""The dashboard on a terminal: its address, a warning if others can reach it, and a clean end."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedprompt.dashboard.server import Dashboard, is_loopback
from fedprompt.errors import RunError
from fedprompt.io.safe_text import safe_line

FOLDER = Path("runs")  # the default folder of runs; it may be created later


def serve(
    folders: Sequence[Path] | None,
    host: str,
    port: int | None,
    open_browser: bool,
    federation: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Until Ctrl-C. `federation` tells how a federation stands, which then gets a page of its own."""
    for folder in folders or ():
        if not folder.exists():
            raise RunError(f"run: {str(folder)!r} must be a run directory or hold some, but there is nothing")
    chosen = list(folders or [FOLDER])
    with Dashboard(chosen, host, port, federation) as server:
        if not is_loopback(host):
            warning = (
                "there is no login: anyone who can reach this address sees names, settings and results of all runs"
            )
            print(safe_line(f"WARNING: {warning}"), file=sys.stderr)
        try:
            named = ", ".join(map(str, chosen))
            print(safe_line(f"dashboard of {named}: {server.address} (Ctrl-C ends it)"), flush=True)
            if open_browser and not webbrowser.open(server.address):
                print("no browser could be opened; open the address above", file=sys.stderr)
            server.serve_forever()
        except KeyboardInterrupt:
            print("dashboard ended", file=sys.stderr)
