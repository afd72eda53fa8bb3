"""The pace at which a node looks for messages."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

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
