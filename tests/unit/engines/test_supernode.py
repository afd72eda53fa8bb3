"""How Flower's loop is made to serve a node: the pace at which it looks for messages, and runs that are stopped."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedprompt.engines.flower import supernode
from fedprompt.engines.flower.supernode import BRISK, SOON, Pace

pytestmark = pytest.mark.unit


def test_a_node_is_brisk_after_a_message_and_patient_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [1000.0], []
    monkeypatch.setattr(supernode.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(supernode.time, "sleep", slept.append)
    pace = Pace()
    pace.sleep(3)
    pace.busy()
    pace.sleep(3)
    pace.sleep(0.1)
    now[0] += SOON + 0.1
    pace.sleep(3)
    assert slept == [3, BRISK, 0.1, 3]


def test_flowers_loop_asks_its_module_time_for_nothing_but_sleep() -> None:
    """`Pace` stands for it: a version of Flower that wants more must be noticed here."""
    source = import_module("flwr.supernode.start_client_internal")
    tree = ast.parse(Path(str(source.__file__)).read_text(encoding="utf-8"))
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    assert asked == {"sleep"}


class Recorder:
    """Stands for a SuperNode's memory: notes which calls were made, and knows one run."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        answers = {
            "get_run": SimpleNamespace(primary_task_type="", fab_hash=""),
            "create_task": 7,
            "preregister": ["x"],
        }
        return lambda *given, **named: self.calls.__setitem__(name, (given, named)) or answers.get(name)


@pytest.mark.parametrize("mended", [False, True])
def test_a_message_of_a_run_that_is_stopped_while_it_comes_in_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """Flower by itself leaves a task behind that nobody can do, and a node that tries it does nothing else any more."""
    monkeypatch.setattr(supernode.loop, "_pull_and_store_message", supernode.loop._pull_and_store_message)
    if mended:
        supernode.clean_up_after_stopped_runs()

    def stopped(*_: Any) -> bytes:
        raise supernode.RunNotRunningException

    metadata = SimpleNamespace(run_id=1, message_id="m", group_id="", message_type="train")
    memory, objects = Recorder(), Recorder()
    done = supernode.loop._pull_and_store_message(
        state=memory,
        object_store=objects,
        node_config={},
        receive=lambda: (SimpleNamespace(metadata=metadata), None),
        get_run=None,
        get_fab=None,
        pull_object=stopped,
        confirm_message_received=None,
        trusted_entities=None,
    )
    assert done is None
    assert ("create_task" in memory.calls, "finish_task" in memory.calls) == (True, mended)
    assert ("delete_messages" in memory.calls, "delete" in objects.calls) == (mended, mended)
    if mended:
        assert memory.calls["finish_task"][0] == (7,)
