"""Other programs at work: environments of their own, made once, and processes that do a job whenever they are asked."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fedprompt.io.files import cache_directory

REQUIREMENTS = {
    "pfl": ("pfl[pytorch]==0.6.0", "torch==2.13.0"),
    "flower": ("flwr[simulation]==1.41.0", "torch==2.13.0", "numpy", "transformers==5.22.2", "pillow"),
}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then listens on loopback only
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
INSTALL_SECONDS, ANSWER_SECONDS, END_SECONDS = 1200, 300, 30
MARK = "FEDPROMPT_BENCH"  # an environment variable by which processes that a worker left behind are found


class Unavailable(Exception):
    """A program that cannot be measured here, and why."""


def environment(name: str) -> Path:
    """The Python of an environment with a peer's packages, made in the cache the first time."""
    folder, wanted = cache_directory() / "bench" / name, "\n".join(REQUIREMENTS[name])
    stamp, python = folder / "requirements.txt", folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and python.exists():
        return python
    print(f"making an environment for {name} (once)", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"no environment for {name}: {error}") from error
        if done.returncode:
            raise Unavailable(f"no environment for {name}: {last_line(done.stderr)}")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "no word on why"


def parsed(text: str | bytes) -> dict[str, Any]:
    """What a program answered; one that says something else cannot be measured."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unavailable(f"must answer with a JSON object, got {text[:100]!r}")
    return found


class Worker:
    """A process that answers every line it gets with a line of JSON. It uses one thread, and ends with all it started."""

    def __init__(self, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **ONE_THREAD, **(extra or {}), MARK: self._mark},
        )
        self._heard = b""  # behind the last whole line

    def ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._silent() from None
        return parsed(self._line())

    def _line(self) -> bytes:
        """The next line, if all of it comes in time."""
        assert self._process.stdout is not None
        last = time.monotonic() + ANSWER_SECONDS
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, last - time.monotonic()))
            more = os.read(self._process.stdout.fileno(), 2**16) if ready and time.monotonic() < last else b""
            if not more:
                raise self._silent()
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _silent(self) -> Unavailable:
        self._errors.seek(0)
        return Unavailable(f"gave no answer: {last_line(self._errors.read())}")

    def close(self) -> None:
        """End the process: by closing its input, then by force; and then whatever it has left behind."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, with our question unread
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_marked(self._mark)
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark in their environment."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def end_marked(mark: str) -> None:
    """End them, each by its number, and wait until they are gone."""
    last = time.monotonic() + END_SECONDS
    while (left := marked(mark)) and time.monotonic() < last:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


def peak_megabytes(process: int) -> float:
    """The most memory a running process has had since it was started; 0 when it has ended.

    What `wait4` says would also hold that of the process which started it.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) / 1024 if found else 0.0


def take_turns(commands: Mapping[str, Sequence[str]], repeats: int, extra: Mapping[str, str]) -> dict[str, list[Any]]:
    """The answers of several workers that are asked one after the other, again and again. What they say first is not counted."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(command, extra)) for name, command in commands.items()}
        return answers(workers, repeats)


def answers(workers: Mapping[str, Worker], repeats: int) -> dict[str, list[Any]]:
    for worker in workers.values():
        worker.ask()
    found: dict[str, list[Any]] = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            found[name].append(worker.ask())
    return found


def printed(command: Iterable[str], seconds: float) -> dict[str, Any]:
    """The JSON that a program prints, run alone and with one thread."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **ONE_THREAD},
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"took more than {seconds:g} s") from error
    if done.returncode:
        raise Unavailable(last_line(done.stderr))
    return parsed(done.stdout)
