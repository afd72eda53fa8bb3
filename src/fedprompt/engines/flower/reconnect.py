"""How a restarted node connects. A SuperLink refuses the key of a node that it considers connected, which lasts a minute
after the node was killed. So a restarted node repeats its request until the SuperLink has noticed the disconnection.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import httpx
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedprompt.errors import RunError
from fedprompt.io.safe_text import safe_line

MISSED = (
    HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL + 15.0
)  # seconds after which the SuperLink has noticed that a node is gone
PAUSE = 2.0
REASON = "its key must be admitted there, and no other node may be connected with it"


def wait_to_be_let_in(longest: float = MISSED) -> None:
    """Let the SuperNode of this process repeat a refused request; a RunError after `longest` seconds."""
    kind: Any = FleetHttpClient
    original = kind.ActivateNode

    def activate(client: FleetHttpClient, request: Any) -> Any:
        end, warned = time.monotonic() + longest, False
        while True:
            try:
                return original(client, request)
            except httpx.HTTPStatusError as error:
                reported = FlowerError.from_json(error.response.text)
                if reported is None or reported.code != ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                    raise
            if time.monotonic() > end:
                raise RunError(f"the server does not admit this node: {REASON}")
            if not warned:
                print(safe_line(f"not admitted yet: {REASON}; retrying for {longest:g} s"), file=sys.stderr, flush=True)
                warned = True
            time.sleep(PAUSE)

    kind.ActivateNode = activate


def why(end: SystemExit) -> BaseException:
    """The error behind Flower's exit: Flower turns every error during the connection into a SystemExit."""
    cause = end.__context__ if end.code else None  # with exit code 0 a person stopped it, possibly during an error
    if isinstance(cause, httpx.HTTPError):
        return RunError(f"no connection to the server: {cause}")
    return cause if isinstance(cause, RunError) else end
