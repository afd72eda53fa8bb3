"""A site's connection: Flower's own SuperNode, with its tasks done in this process instead of one process per task.

The SuperNode runs with `--isolation process`, which gives its tasks to any program that holds a secret. Flower's own program
would unpack the code sent with the run and start it. This one takes the order from the message, runs it with the code
that is installed here, and ignores the rest of the message.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedprompt.engines.flower.reconnect import wait_to_be_let_in, why
from fedprompt.engines.flower.transport import answered, order_in
from fedprompt.io.files import BINARY
from fedprompt.io.safe_text import safe_line

program: Any = import_module("flwr.supernode.cli.flower_supernode")  # the package has a function of that name

loop: Any = import_module("flwr.supernode.start_client_internal")

HERE = "127.0.0.1"
PAUSE = 0.2  # seconds between two checks for a task
BRISK, SOON = 0.3, 15.0  # seconds between two checks for a message, during this many seconds after the last one
HEARTBEAT = 10.0  # seconds between two heartbeats of a task; Flower gives up after 60
CHATTER = ("[RUN ", "Receiving: ", "Received ", "Sending: ", "Sent ", "EXPERIMENTAL")  # how Flower's log lines begin
PROTECTED = frozenset({"/flwr.proto.Runtime/AcquireTask"})

Work = Callable[[bytes], bytes]  # the answer to an order


def attend(arguments: Sequence[str], work: Work) -> None:
    """Run a SuperNode with these arguments in this process until it is stopped, and do its tasks."""
    port, secret = free_port(), secrets.token_bytes(32)
    with _secret_file(secret) as file:
        own = ["--isolation", "process", "--host", HERE, "--port", str(port), "--superexec-auth-secret-file", str(file)]
        pace = Pace()

        def paced(order: bytes) -> bytes:
            try:
                return work(order)
            finally:
                pace.busy()

        loop.time = pace
        clean_up_after_stopped_runs()
        _when_listening(Thread(target=_attend, args=(port, secret, paced), daemon=True).start)
        logging.getLogger("flwr").addFilter(_worth_telling)
        wait_to_be_let_in()
        sys.argv = ["flower-supernode", *arguments, *own]
        try:
            program.flower_supernode()
        except SystemExit as end:
            raise why(end) from None


class Pace:
    """How long the SuperNode waits between two checks for a message: three seconds, but much less during a run.

    It replaces the module `time` in Flower's loop. Idle nodes poll the server no more often than before.
    """

    def __init__(self) -> None:
        self._last = -math.inf

    def busy(self) -> None:
        """Note that a message was answered; the next one may follow soon."""
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, BRISK) if time.monotonic() - self._last < SOON else seconds)


def clean_up_after_stopped_runs() -> None:
    """Let the SuperNode drop a message whose run was stopped during the transfer.

    The signal for this is not an `Exception`, so it skips Flower's own cleanup, and the task created for the message
    would wait without end.
    """
    original = loop._pull_and_store_message

    def pull(**given: Any) -> Any:
        steps = {name: _failing_plainly(given[name]) for name in ("pull_object", "confirm_message_received")}
        return original(**{**given, **steps})

    loop._pull_and_store_message = pull


def _failing_plainly(step: Callable[..., Any]) -> Callable[..., Any]:
    def done(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except RunNotRunningException:
            raise RuntimeError("the run was stopped") from None

    return done


def _when_listening(then: Callable[[], None]) -> None:
    """Call a function once the SuperNode of this process has its port. Before that, another process could own the port."""
    original = program._start_supernode_http_api

    def started(*arguments: Any, **settings: Any) -> Any:
        server = original(*arguments, **settings)
        then()
        return server

    program._start_supernode_http_api = started


def free_port() -> int:
    """A port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def _attend(port: int, secret: bytes, work: Work) -> None:
    """Do one task after another. When the SuperNode ends, this process ends soon, too."""
    client = _client(port, SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=PROTECTED))
    request = AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})
    while True:
        try:
            found = client.AcquireTask(request)
        except Exception as error:  # shutting down, or an error of one run
            if not isinstance(error, httpx.TransportError):
                print(safe_line(f"no task: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
            time.sleep(PAUSE)
            continue
        if not found.HasField("task") or not found.token:
            time.sleep(PAUSE)
            continue
        try:
            _do(port, found.token, work)
        except Exception as error:  # one task that Flower lost must not end the node
            print(safe_line(f"task lost: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)


def _do(port: int, token: str, work: Work) -> None:
    client = _client(port, RuntimeTokenHttpInterceptor(token))
    try:
        with _alive(client):
            message, context, _, _ = pull_task_input(client)
            push_message(client, answered(message, work(order_in(message))), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    finally:
        client.close()


@contextmanager
def _alive(client: RuntimeHttpClient) -> Iterator[None]:
    """Send the SuperNode heartbeats while a task is running."""
    done = Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT):
            with suppress(httpx.HTTPError):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _client(port: int, interceptor: ProtobufClientInterceptor) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        server_address=f"{HERE}:{port}",
        insecure=True,  # the port is local to this machine and belongs to this process
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), interceptor],
        retry_invoker=None,  # Flower's own invoker ends the process if a task is unknown
    )


@contextmanager
def _secret_file(secret: bytes) -> Iterator[Path]:
    """The secret in a file that only this user can read. It is deleted when the SuperNode has ended."""
    with tempfile.TemporaryDirectory(prefix="fedprompt-node-") as folder:
        file = Path(folder) / "secret"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o600), "wb") as stream:
            stream.write(secret)
        yield file


def _worth_telling(record: logging.LogRecord) -> bool:
    """Hide Flower's five lines per message, which the node logs itself, and the warning that the secret is experimental."""
    return not record.getMessage().strip().startswith(CHATTER) and bool(record.getMessage().strip())
