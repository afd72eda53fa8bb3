"""`fedprompt` in a process of its own, without the seconds its imports take.

The processes are forked from a server that has imported everything once, so that a command costs what its work costs. All else is
that of a command of its own: its folder, its environment, its exit code, its memory, and whatever a test does to it.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fedprompt

CONTEXT = multiprocessing.get_context("forkserver")
METHODS = [
    module.name for module in pkgutil.walk_packages(fedprompt.__path__, "fedprompt.") if ".methods" in module.name
]
CONTEXT.set_forkserver_preload(
    [
        "fedprompt.cli",
        "fedprompt.experiment",
        "fedprompt.inference.loaded_run",
        "fedprompt.report.comparison_table",
        "matplotlib.pyplot",
        *METHODS,
    ]
)
LONGEST = 300  # seconds a command may take

Plant = Callable[[], None]
Call = Callable[..., subprocess.CompletedProcess[str]]


class Ended(NamedTuple):
    """How a command ended: its exit code, negative when a signal ended it, and what it said."""

    code: int | None
    words: str


class Started:
    """A command under way. What it says goes to one file, or that on standard output to another one where `apart`."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], plant: Plant | None = None, apart: bool = False, **more: str
    ) -> None:
        """`more` is added to the environment it starts with, which is that of this process."""
        name = f"{time.monotonic_ns()}"
        self.log = folder / f"{name}.log"
        self.output = folder / f"{name}.out" if apart else self.log
        told = (folder, arguments, self.output, self.log, {**os.environ, **more}, plant)
        self._process = CONTEXT.Process(target=_work, args=told, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    @property
    def words(self) -> str:
        """What it has said so far."""
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, text: str) -> None:
        """Until it says so; a command that ends first is a failure."""
        for _ in range(LONGEST * 50):
            if text in self.words:
                return
            assert self.running or text in self.words, f"it ended before it said {text!r}: {self.words}"
            time.sleep(0.02)
        raise AssertionError(f"{text!r} must be said within {LONGEST} seconds, not {self.words}")

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> Ended:
        self._process.join(LONGEST)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError("the command must end")
        return Ended(self._process.exitcode, self.words)


def call(folder: Path, *arguments: str, plant: Plant | None = None) -> Ended:
    """`fedprompt` with these arguments in a folder, until it ends."""
    return Started(folder, arguments, plant).end()


def command_line(folder: Path) -> Call:
    """`fedprompt` in a folder, with a cache of its own there: `command_line(folder)("run", "tiny.yaml")`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        started = Started(folder, arguments, apart=True, FEDPROMPT_CACHE=str(folder / "cache"), COLUMNS="200")
        ended = started.end()
        assert ended.code is not None
        found = subprocess.CompletedProcess(arguments, ended.code, started.output.read_text(), ended.words)
        started.output.unlink()
        started.log.unlink()
        return found

    return run


def _work(
    folder: Path, arguments: tuple[str, ...], output: Path, log: Path, environment: dict[str, str], plant: Plant | None
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for path, number in ((output, 1), (log, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    from fedprompt.cli import main

    if plant is not None:
        plant()
    sys.argv = ["fedprompt", *arguments]
    main()
