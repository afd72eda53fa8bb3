"""Everything of Flower that its documentation does not promise, in one file. No function of Flower is replaced or wrapped.

| used for | names |
|---|---|
| the server | `_parse_superlink_lifespan_config`, `SuperLinkLifespan`, `create_app` |
| the gate | `authenticate_node`, the link state |
| a node | the client of the Fleet API, its interceptors, and how a message becomes objects and is made of objects |
| the register of nodes | the client of the Control API |
| reading errors | `FlowerError`, `ApiErrorCode`, `ErrorCode` |

`tests/unit/engines/test_flower_compat.py` has a test for each assumption about them; each fails with a sentence that says what
changed in Flower and what depends on it. The other modules use `flwr.app`, `flwr.serverapp`, `flwr.clientapp` and
`flwr.simulation`, which are documented.
"""

from __future__ import annotations

import sys
from base64 import b64decode
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI, HTTPException, Request
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedprompt.engines.flower.answer_limits import AnswerLimits

OLDEST, NEWEST = (1, 41), (1, 42)
"""Releases whose federations were run here; pyproject.toml names the same."""

BEAT: float = HEARTBEAT_DEFAULT_INTERVAL
"""Seconds that a heartbeat of a node counts."""
MISSED: float = HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL
"""Seconds without a heartbeat after which the SuperLink considers a node offline."""

UNAVAILABLE: int = ErrorCode.NODE_UNAVAILABLE
NOT_ADMITTED: int = ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED

__all__ = [
    "BEAT",
    "MISSED",
    "NEWEST",
    "NOT_ADMITTED",
    "OLDEST",
    "UNAVAILABLE",
    "ControlHttpClient",
    "FleetCalls",
    "FlowerError",
    "HeartbeatSender",
    "ListNodesRequest",
    "Message",
    "Node",
    "RegisterNodeRequest",
    "UnregisterNodeRequest",
    "control_client",
    "installed",
    "proven",
    "superlink",
]


def installed() -> tuple[int, int]:
    """The installed release of Flower, its first two numbers."""
    major, minor, *_ = version("flwr").split(".")
    return int(major), int(minor)


def superlink(arguments: Sequence[str]) -> tuple[FastAPI, dict[str, Any]]:
    """The application of `flower-superlink ARGUMENTS`, and the arguments of uvicorn that depend on them.

    It is Flower's own; only who starts the server differs, so that the gate can stand before it.
    """
    program: Any = import_module("flwr.superlink.cli.flower_superlink")  # the package has a function of that name
    before = sys.argv
    sys.argv = ["flower-superlink", *arguments]
    try:
        config = program._parse_superlink_lifespan_config()
    finally:
        sys.argv = before
    main: Any = import_module("flwr.superlink.main")
    where = {name: getattr(config, name) for name in ("host", "port", "ssl_keyfile", "ssl_certfile")}
    return main.create_app(config, program.SuperLinkLifespan), where


def proven(app: Any, headers: Mapping[str, str]) -> bytes:
    """The public key of the node that sent a request to this application, from the proof in its headers; empty if there is none.

    This calls Flower's own check. Flower repeats it, together with the body, when the body has arrived.
    """
    from flwr.superlink.routers.fleet.node_auth import authenticate_node

    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
    except (KeyError, ValueError):
        return b""
    if app.state.linkstate_factory.state().get_node_id_by_public_key(key) is None:
        return b""
    claim = SimpleNamespace(protobuf_request=ActivateNodeRequest(public_key=key))
    try:
        authenticate_node(cast(Request, SimpleNamespace(headers=headers, state=claim)))
    except HTTPException:
        return b""
    return key


def control_client(address: str, ca_certificate: Path | None) -> ControlHttpClient:
    """Calls of the Control API, as `flwr` makes them."""
    return ControlHttpClient.from_server_address(
        server_address=address,
        insecure=ca_certificate is None,
        root_certificates=None if ca_certificate is None else ca_certificate.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )


class FleetCalls:
    """The calls of a SuperNode. Each is one request, or a few for the parts of a message; none is repeated here."""

    def __init__(self, address: str, ca_certificate: Path | None, key: Path | None) -> None:
        """Without a key a new one is made and registered: only a SuperLink without authentication accepts it."""
        self._registers = key is None
        private, public = generate_key_pairs() if key is None else _key_pair(key)
        self._public = public_key_to_bytes(public)
        self._client = FleetHttpClient.from_server_address(
            address,
            ca_certificate is None,
            None if ca_certificate is None else ca_certificate.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, public),
            ],
        )
        self._client._client.follow_redirects = False  # a server may not send a node, and its update, elsewhere
        self._limits = AnswerLimits()
        self._client._client.event_hooks = {"response": [self._limits]}
        self._node = Node()

    def activate(self) -> int:
        """Connect; the number of this node."""
        if self._registers:
            self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
            self._registers = False
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=BEAT)
        self._node = Node(node_id=self._client.ActivateNode(request).node_id)
        return int(self._node.node_id)

    def beat(self) -> bool:
        """Send a heartbeat; False if the SuperLink does not know this node."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=BEAT)
        return bool(self._client.SendNodeHeartbeat(request).success)

    def pull(self) -> Message | None:
        """The next message, if there is one."""
        self._limits.new_message()
        found = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        run, tree = found.messages_list[0].metadata.run_id, found.message_object_trees[0]

        def confirm(name: str) -> None:
            request = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
            self._client.ConfirmMessageReceived(request)

        pull = make_pull_object_fn_protobuf(self._client.PullObject, self._node, run)
        message: Message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
        message.metadata.__dict__["_message_id"] = tree.object_id  # not part of the object that travels
        return message

    def push(self, message: Message, seconds: float) -> None:
        """Send an answer that took this many seconds."""
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            wanted = self._client.PushMessages(request)
            run = message.metadata.run_id
            push = make_push_object_fn_protobuf(self._client.PushObject, self._node, run, wanted.session_id)
            push_objects(objects, push, object_ids_to_push=set(wanted.objects_to_push))

    def deactivate(self) -> None:
        """Disconnect."""
        self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def unregister(self) -> None:
        """Remove a node that registered itself."""
        self._client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self._node.node_id))

    def close(self) -> None:
        self._client.close()


def _key_pair(key: Path) -> tuple[Any, Any]:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    private: Any = load_ssh_private_key(key.read_bytes(), None)
    return private, private.public_key()
