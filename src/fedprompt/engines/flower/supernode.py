"""A site's end of the line: Flower's own SuperNode, whose tasks are done here instead of in a process for each.

The SuperNode runs with `--isolation process`, which leaves its tasks to whoever can prove that it knows a secret. Flower's own
programs would now unpack the code that came with the run and start it. This one takes the order out of the message, has
it done by the code that is installed here, and never looks at what else came.
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
from fedprompt.io.safe_text import safe_line

program: Any = import_module("flwr.supernode.cli.flower_supernode")  # the package has a function of that name

loop: Any = import_module("flwr.supernode.start_client_internal")

HERE = "127.0.0.1"
PAUSE = 0.2  # seconds between two looks for a task
BRISK, SOON = 0.3, 15.0  # seconds between two looks for a message, in the seconds after the last one
HEARTBEAT = 10.0  # seconds between two signs of life of a task; Flower gives up after 60
CHATTER = ("[RUN ", "Receiving: ", "Received ", "Sending: ", "Sent ", "EXPERIMENTAL")  # how lines of Flower's begin
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
    """How long the SuperNode waits between two looks for a message: three seconds, but hardly at all while a run is on.

    It stands for the module `time` in Flower's loop. A server with many idle nodes is asked no more often than before.
    """

    def __init__(self) -> None:
        self._last = -math.inf

    def busy(self) -> None:
        """A message was answered; the next one may follow soon."""
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, BRISK) if time.monotonic() - self._last < SOON else seconds)


def clean_up_after_stopped_runs() -> None:
    """Have the SuperNode forget a message whose run was stopped while it came in.

    What tells so is no `Exception`, so it passes Flower's own cleaning up, and the task that was made for the message would
    wait for the rest of it for ever.
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
    """Do something once the SuperNode of this process has its port. Before that it might be somebody else's."""
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
    """Take one task after another. Where the SuperNode has ended this process is about to, too."""
    client = _client(port, SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=PROTECTED))
    request = AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})
    while True:
        try:
            found = client.AcquireTask(request)
        except Exception as error:  # going down, or a matter of one run
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
    """Tell the SuperNode now and then that a task is being worked on."""
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
        insecure=True,  # the port is this machine's own, and this process's
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), interceptor],
        retry_invoker=None,  # Flower's own ends the process where a task is no longer known
    )


@contextmanager
def _secret_file(secret: bytes) -> Iterator[Path]:
    """The secret in a file that this user alone can read, until the SuperNode has read it and ended."""
    with tempfile.TemporaryDirectory(prefix="fedprompt-node-") as folder:
        file = Path(folder) / "secret"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secret)
        yield file


def _worth_telling(record: logging.LogRecord) -> bool:
    """Not five lines for every message, of which the node tells itself, nor that the secret is experimental."""
    return not record.getMessage().strip().startswith(CHATTER) and bool(record.getMessage().strip())
