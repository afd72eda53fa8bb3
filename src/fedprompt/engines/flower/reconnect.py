"""How a node gets in. A SuperLink refuses the key of a node that it believes to be connected, and it believes so for a
minute after the node was killed: one that is started again asks until it has been missed.
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
)  # seconds after which a node that is gone has been missed
PAUSE = 2.0
REASON = "its key must be admitted there, and no other node may be connected with it"


def wait_to_be_let_in(longest: float = MISSED) -> None:
    """Have the SuperNode of this process ask again where it is refused; a RunError in the end."""
    kind: Any = FleetHttpClient
    original = kind.ActivateNode

    def activate(client: FleetHttpClient, request: Any) -> Any:
        end, told = time.monotonic() + longest, False
        while True:
            try:
                return original(client, request)
            except httpx.HTTPStatusError as error:
                said = FlowerError.from_json(error.response.text)
                if said is None or said.code != ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                    raise
            if time.monotonic() > end:
                raise RunError(f"the server does not let this node in: {REASON}")
            if not told:
                print(safe_line(f"not let in yet: {REASON}; asking for {longest:g} s"), file=sys.stderr, flush=True)
                told = True
            time.sleep(PAUSE)

    kind.ActivateNode = activate


def why(end: SystemExit) -> BaseException:
    """The error that Flower ended this process for; it makes an exit of every one that comes up while it connects."""
    cause = end.__context__ if end.code else None  # a person who ends it may do so in the middle of an error
    if isinstance(cause, httpx.HTTPError):
        return RunError(f"no connection to the server: {cause}")
    return cause if isinstance(cause, RunError) else end
