"""What a node reads from its server is bounded, whatever the server sends."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedprompt.engines.flower import answer_limits, compat, supernode
from fedprompt.engines.flower.answer_limits import AnswerTooLarge
from fedprompt.engines.flower.transport import ORDER, RECORD, order_in
from fedprompt.errors import RunError

pytestmark = pytest.mark.unit

MIB = 2**20
MOST = 4 * MIB  # for a message, in these tests


class Server(ThreadingHTTPServer):
    """A server that sends what it likes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, bytes] = {}  # by the last part of the path
        self.objects: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.endless = False
        self.sent = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        route = self.path.rpartition("/")[2]
        found = next((content for name, content in self.server.objects.items() if name.encode() in asked), b"")
        answer = self.server.answers.get(route, found if route == "pull-object" else b"")
        self.send_response(200)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        if not self.server.endless:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        try:
            while True:
                self.wfile.write(answer)
                self.server.sent += len(answer)
                if not self.server.endless:
                    return
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(answer_limits, "LARGEST_MESSAGE", MOST)
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def calls(server: Server) -> Iterator[compat.FleetCalls]:
    made = compat.FleetCalls(f"127.0.0.1:{server.server_address[1]}", None, None)
    yield made
    made.close()


def offered(server: Server, monkeypatch: pytest.MonkeyPatch, *records: int) -> None:
    """The server has a message with records of these sizes in bytes; the first is the order."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    content = {
        f"{RECORD}{place or ''}": ConfigRecord({ORDER: bytes([place]) * size}) for place, size in enumerate(records)
    }
    message = Message(RecordDict(content), 1, "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    listed = compat.message_to_proto(compat.remove_content_from_message(message))
    tree = get_object_tree(message)
    server.answers["pull-messages"] = PullMessagesResponse(
        messages_list=[listed], message_object_trees=[tree]
    ).SerializeToString()
    server.answers["confirm-message-received"] = ConfirmMessageReceivedResponse().SerializeToString()
    for name, each in get_all_nested_objects(message).items():
        found = PullObjectResponse(object_found=True, object_available=True, object_content=each.deflate())
        server.objects[name] = found.SerializeToString()


def test_a_message_within_the_limit_arrives_and_so_does_the_next(
    server: Server, calls: compat.FleetCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered(server, monkeypatch, MOST - MIB)
    for _ in range(2):
        message = calls.pull()
        assert message is not None
        assert len(order_in(message)) == MOST - MIB


def test_a_message_that_is_too_large_is_dropped(
    server: Server, calls: compat.FleetCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered(server, monkeypatch, MOST + MIB)
    with pytest.raises(AnswerTooLarge, match=f"a message of the server must have at most {MOST} bytes"):
        calls.pull()


def test_many_parts_count_together(server: Server, calls: compat.FleetCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(server, monkeypatch, *[MIB - 2**10] * 8)
    with pytest.raises(AnswerTooLarge):
        calls.pull()


def test_a_compressed_answer_is_not_unpacked(server: Server, calls: compat.FleetCalls) -> None:
    """2 MB of these were 4 GB in the memory of a node, before it had said who it is."""
    server.answers["pull-messages"] = gzip.compress(bytes(64 * MIB))
    server.headers["Content-Encoding"] = "gzip"
    with pytest.raises(AnswerTooLarge, match="must not be compressed"):
        calls.pull()


@pytest.mark.parametrize("call", ["pull", "beat", "activate"])
def test_an_answer_without_an_end_is_not_read_on(server: Server, calls: compat.FleetCalls, call: str) -> None:
    server.endless = True
    server.answers = dict.fromkeys(["pull-messages", "send-node-heartbeat", "register-node"], bytes(2**16))
    with pytest.raises(AnswerTooLarge, match=f"an answer of the server must have at most {MIB} bytes"):
        getattr(calls, call)()
    assert server.sent < 16 * MIB, "what fits between the two, and no more"


def test_a_node_ends_with_a_sentence_where_it_cannot_even_connect(server: Server, calls: compat.FleetCalls) -> None:
    server.answers["register-node"] = bytes(2 * MIB)
    with pytest.raises(RunError, match="no connection to the server: an answer of the server must have at most"):
        supernode._activated(calls, lambda well: None)
