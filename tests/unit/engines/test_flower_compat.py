"""What fedprompt takes for granted of Flower beyond its documentation: one test for each assumption of `compat.py`.

A new release that breaks one fails here with a sentence, before a federation fails without one.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import uvicorn
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedprompt.engines.flower import compat

pytestmark = pytest.mark.unit

ADAPTER = Path(compat.__file__).parent
PROJECT = Path(__file__).parents[3] / "pyproject.toml"
DOCUMENTED = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
INSECURE = ["--insecure", "--host", "127.0.0.1", "--port", "1", "--isolation", "process"]


def _imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "flwr"}


def test_only_one_file_uses_what_flower_does_not_document() -> None:
    for file in ADAPTER.glob("*.py"):
        hidden = _imported(file) - DOCUMENTED
        assert not hidden or file.name == "compat.py", f"{file.name} must take {hidden} from compat.py"


def test_nothing_of_flower_is_replaced() -> None:
    """No assignment in the adapter has a module or class of Flower on its left side, and nothing calls `setattr`."""
    for file in ADAPTER.glob("*.py"):
        tree = ast.parse(file.read_text())
        names = {"extensions", "main", "program", "loop", "FleetHttpClient", "uvicorn", "compat"}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                changed = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
                assert not (changed and target.value.id in names), (
                    f"{file.name}:{node.lineno} replaces a part of Flower"
                )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "setattr", f"{file.name}:{node.lineno} may replace a part of Flower"


def test_the_installed_release_is_one_whose_federations_were_run() -> None:
    assert compat.OLDEST <= compat.installed() <= compat.NEWEST, (
        f"Flower {compat.installed()} was never tried here: run `make test-flower` with it, then raise NEWEST in compat.py "
        "and the limit in pyproject.toml"
    )


def test_the_project_asks_for_the_same_releases() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    low, high = ".".join(map(str, compat.OLDEST)), f"{compat.NEWEST[0]}.{compat.NEWEST[1] + 1}"
    wanted = [line for lines in extras.values() for line in lines if line.startswith("flwr")]
    assert wanted, "an extra must ask for flwr"
    for line in wanted:
        assert line.endswith(f">={low},<{high}"), f"{line} must allow what compat.py names: >={low},<{high}"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Arguments of a SuperLink that listens nowhere."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    return [*INSECURE, "--database", str(tmp_path / "superlink.db")]


def test_the_server_is_made_from_its_arguments_and_not_started(memory: list[str]) -> None:
    app, where = compat.superlink(memory)
    assert where == {"host": "127.0.0.1", "port": 1, "ssl_keyfile": None, "ssl_certfile": None}, (
        "flower-superlink no longer keeps host, port and certificate files of its arguments under these names: superlink() "
        "would listen elsewhere or without TLS"
    )
    assert app.state.superlink_lifespan is not None, (
        "create_app no longer takes the lifespan, so nothing would start runs"
    )


def test_the_server_would_be_started_by_uvicorn_alone() -> None:
    """What Flower does around `uvicorn.run` is what `superlink()` leaves out: nothing may be added to it unseen."""
    program: Any = import_module("flwr.superlink.cli.flower_superlink")
    source = inspect.getsource(program.flower_superlink) + inspect.getsource(program._run_superlink_http_api)
    calls = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(inspect.cleandoc(source))) if isinstance(node, ast.Call)
    }
    assert calls <= {
        "warn_if_flwr_update_available",
        "_parse_superlink_lifespan_config",
        "log",
        "event",
        "_run_superlink_http_api",
        "create_app",
        "uvicorn.run",
        "get_uvicorn_log_config",
    }, "flower-superlink does more at its start than making its application: superlink() may have to do it, too"


def test_all_routes_of_nodes_are_where_the_gate_lets_nodes_through(memory: list[str]) -> None:
    app, _ = compat.superlink(memory)
    routes = {path for path in app.openapi()["paths"] if path.startswith("/v1/fleet/")}
    wanted = {"activate-node", "send-node-heartbeat", "pull-messages", "push-messages", "pull-object", "push-object"}
    missing = {f"/v1/fleet/{name}" for name in wanted} - routes
    assert not missing, f"the Fleet API no longer has {missing}: the gate and FleetCalls use these routes"
    assert "/health" in app.openapi()["paths"], (
        "the SuperLink no longer has /health, which the server asks at its start"
    )


def test_the_proof_of_a_node_is_in_the_headers_of_its_requests(memory: list[str]) -> None:
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    app, _ = compat.superlink(memory)
    private, public = generate_key_pairs()
    key = public_key_to_bytes(public)
    app.state.linkstate_factory.state().create_node("a", "", key, 30.0)
    app.state.enable_supernode_auth = True
    request = Any

    class Context:
        def __init__(self) -> None:
            import httpx

            self.request = httpx.Request("POST", "http://127.0.0.1")

    def signed(by: Any, named: Any) -> dict[str, str]:
        context: Any = Context()
        NodeAuthHttpInterceptor(by, named).intercept(context, lambda context: request)  # type: ignore[arg-type]
        return dict(context.request.headers)

    changed = (
        "a node signs its requests otherwise: the gate would take every node for a stranger, or a stranger for a node"
    )
    assert compat.proven(app, signed(private, public)) == key, changed
    other, unknown = generate_key_pairs()
    assert compat.proven(app, signed(other, public)) == b"", changed
    assert compat.proven(app, signed(other, unknown)) == b"", changed
    assert compat.proven(app, {}) == b"", changed


class Wire:
    """A Fleet API with one message, in memory, that speaks as the SuperLink does."""

    def __init__(self, message: Message) -> None:
        from flwr.common.serde import message_to_proto
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        message.metadata.__dict__["_message_id"] = message.object_id
        self.tree = get_object_tree(message)
        self.objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
        self.proto = message_to_proto(message)
        self.confirmed: list[str] = []
        self.pushed: dict[str, bytes] = {}
        self.answers: list[Any] = []

    def PullMessages(self, request: Any) -> Any:
        from flwr.proto.fleet_pb2 import PullMessagesResponse

        return PullMessagesResponse(messages_list=[self.proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:
        from flwr.proto.message_pb2 import PullObjectResponse

        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)

    def PushMessages(self, request: Any) -> Any:
        from flwr.proto.fleet_pb2 import PushMessagesResponse
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self.answers.append(request)
        names = [each.object_id for each in iterate_object_tree(request.message_object_trees[0])]
        return PushMessagesResponse(objects_to_push=names, session_id="s")

    def PushObject(self, request: Any) -> Any:
        from flwr.proto.message_pb2 import PushObjectResponse

        self.pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)


def test_a_message_comes_in_parts_and_its_answer_goes_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 5)
    message = Message(RecordDict({"r": ConfigRecord({"order": b"do it"})}), 1, "train")
    wire = Wire(message)
    calls = compat.FleetCalls("127.0.0.1:1", None, None)
    monkeypatch.setattr(calls, "_client", wire)
    came = calls.pull()
    changed = "a message of Flower is no longer made of these parts: nodes could read no order, or send no answer"
    assert came is not None, changed
    assert came.content.config_records["r"]["order"] == b"do it", changed
    assert wire.confirmed == [wire.tree.object_id], changed
    answer = Message(RecordDict({"r": ConfigRecord({"answer": b"done"})}), reply_to=came)
    calls.push(answer, 1.5)
    (request,) = wire.answers
    assert request.messages_list[0].metadata.reply_to_message_id == wire.tree.object_id, changed
    assert list(request.clientapp_runtime_list) == [1.5], changed
    assert any(b"done" in content for content in wire.pushed.values()), changed
    assert b"done" not in request.SerializeToString(), "the content of a message goes out twice"


def test_a_refusal_has_a_number() -> None:
    found = compat.FlowerError.from_json(f'{{"code": {int(compat.NOT_ADMITTED)}, "detail": "no"}}')
    assert found is not None, "FlowerError reads other JSON: a node that may come back later would end at once"
    assert found.code == compat.NOT_ADMITTED, "FlowerError reads other JSON: a node that may come back later would end"


def test_a_heartbeat_counts_for_half_a_minute() -> None:
    assert 10 <= compat.BEAT <= 60, (
        "Flower's heartbeats changed: docs/deploy.md says that a killed node is noticed in 74 s"
    )
    assert compat.BEAT < compat.MISSED <= 120, "Flower notices a killed node later than docs/deploy.md says"


def test_the_register_of_nodes_has_names_keys_and_times() -> None:
    from flwr.proto.node_pb2 import NodeInfo

    fields = set(NodeInfo.DESCRIPTOR.fields_by_name)
    wanted = {"node_id", "name", "status", "public_key", "registered_at", "last_activated_at", "last_deactivated_at"}
    assert wanted <= fields, f"Flower's list of nodes lacks {wanted - fields}: status and admission need them"


def test_uvicorn_takes_the_limits() -> None:
    settings = {*inspect.signature(uvicorn.run).parameters}
    assert {"http", "loop", "ws", "log_config"} <= settings, (
        "uvicorn.run has other settings: connections have no limits"
    )


def test_the_arguments_of_the_server_are_a_dataclass() -> None:
    from flwr.superlink.config_loader import SuperLinkLifespanConfig

    names = {field.name for field in dataclasses.fields(SuperLinkLifespanConfig)}
    wanted = {"host", "port", "ssl_keyfile", "ssl_certfile", "database", "enable_supernode_auth", "isolation"}
    assert wanted <= names, f"the settings of a SuperLink lack {wanted - names}"
