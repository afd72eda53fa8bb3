"""A site's connection: a SuperNode of Flower as far as the server can see, in this process and without its machinery.

Flower's own program gives every message to a new process, with the code that was sent along. This one speaks the same Fleet
API, takes the order from a message, runs it with the code that is installed here, and never asks for the rest. It needs no
port, no second process and no secret between processes.

A SuperLink refuses the key of a node that it considers connected, which lasts a minute after the node was killed. So a
restarted node repeats its request until the SuperLink has noticed the disconnection.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread as this_thread
from threading import main_thread
from types import FrameType
from typing import Any, TypeVar

import httpx

from fedprompt.engines.flower import compat
from fedprompt.engines.flower.answer_limits import AnswerTooLarge
from fedprompt.engines.flower.compat import FleetCalls, FlowerError, HeartbeatSender
from fedprompt.engines.flower.transport import answered, order_in
from fedprompt.errors import RunError
from fedprompt.io.log_lines import fact

BRISK, SOON = 0.3, 15.0  # seconds between two checks for a message, during this many seconds after the last one
IDLE = 3.0  # seconds between two checks otherwise
PAUSE, LONGEST_PAUSE = 1.0, 20.0  # seconds before a request is repeated, at first and at most
MISSED = compat.MISSED + 15.0  # seconds after which the SuperLink has noticed that a node is gone
REASON = "its key must be admitted there, and no other node may be connected with it"
EXPELLED = "the server no longer admits this node: its key was removed there"

Work = Callable[[bytes], bytes]  # the answer to an order
Heard = Callable[[bool], None]  # told whether the server answers
T = TypeVar("T")


class RunStopped(Exception):
    """The run of a message is over, so its answer is not wanted."""


def attend(
    address: str,
    work: Work,
    ca_certificate: Path | None = None,
    key: Path | None = None,
    heard: Heard = lambda well: None,
) -> None:
    """Connect to a SuperLink and answer its messages until a signal stops it. A RunError if it refuses this node."""
    calls = FleetCalls(address, ca_certificate, key)
    try:
        with _ends_on_signals():
            number = _activated(calls, heard)
            fact(f"connected to {address} as node {number}")
            with _beating(calls):
                _attend(calls, work, heard)
    finally:
        calls.close()


def _attend(calls: FleetCalls, work: Work, heard: Heard) -> None:
    last = -float("inf")
    while True:
        try:
            message = _repeated(calls.pull, heard)
            if message is None:
                time.sleep(BRISK if time.monotonic() - last < SOON else IDLE)
                continue
            begin = time.monotonic()
            answer = answered(message, work(order_in(message)))
            last = time.monotonic()
            _repeated(lambda: calls.push(answer, last - begin), heard)  # noqa: B023  called before the next round
        except RunStopped:
            fact("the run was stopped: its message is dropped")
        except RunError:
            raise
        except Exception as error:  # one message that Flower lost or refused must not end the node
            fact(f"message lost: {type(error).__name__}: {error}", "warning")
            time.sleep(IDLE)


def _activated(calls: FleetCalls, heard: Heard, longest: float | None = None) -> int:
    """The number of this node, once the server admits it; a RunError after `longest` seconds."""
    longest = MISSED if longest is None else longest
    end, warned = time.monotonic() + longest, False
    while True:
        try:
            return _repeated(calls.activate, heard)
        except RunStopped:
            raise RunError("no connection to the server: it refuses this node (status 403)") from None
        except AnswerTooLarge as error:
            raise RunError(f"no connection to the server: {error}") from None
        except httpx.HTTPStatusError as error:
            reported = FlowerError.from_json(error.response.text)
            if reported is None or reported.code != compat.NOT_ADMITTED:
                raise RunError(f"no connection to the server: {error}") from error
        if time.monotonic() > end:
            raise RunError(f"the server does not admit this node: {REASON}")
        if not warned:
            fact(f"not admitted yet: {REASON}; retrying for {longest:g} s", "warning")
            warned = True
        time.sleep(2 * PAUSE)


def _repeated(call: Callable[[], T], heard: Heard) -> T:
    """The result of a call, once the server answers; an absent server is waited for without end."""
    pause = PAUSE
    while True:
        try:
            found = call()
            heard(True)
            return found
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status == 403:
                raise RunStopped from None
            if status == 401:
                raise RunError(EXPELLED) from None
            if status < 500:
                raise
            reason = f"status {status}"
        except httpx.TransportError as error:
            if any(word in str(error).lower() for word in ("certificate", "ssl", "tls")):
                raise RunError(f"no connection to the server: {error}") from error
            reason = f"{type(error).__name__}: {error}"
        heard(False)
        if pause == PAUSE:
            fact(f"the server does not answer ({reason}); trying again", "warning")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


@contextmanager
def _beating(calls: FleetCalls) -> Iterator[None]:
    """Send heartbeats until the end, and then say goodbye."""

    def beat() -> bool:
        try:
            return calls.beat()
        except httpx.HTTPError:  # the loop that asks for messages finds out what is wrong
            return False

    sender = HeartbeatSender(beat)
    sender.start()
    try:
        yield
    finally:
        if sender.is_running:
            sender.stop()
        with suppress(httpx.HTTPError):
            calls.deactivate()


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the node at once and well, also in the middle of an order."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    if this_thread() is not main_thread():  # signals belong to the main thread
        yield
        return
    before: dict[int, Any] = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
