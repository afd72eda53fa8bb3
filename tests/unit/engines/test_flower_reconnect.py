"""A node that was killed is let in once the server has missed it; one that nobody knows is told so in the end."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.supercore.error import ApiErrorCode
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedprompt.engines.flower import reconnect
from fedprompt.errors import RunError

pytestmark = pytest.mark.unit


def refusal(code: int) -> Any:
    request = httpx.Request("POST", "http://127.0.0.1")
    answer = httpx.Response(400, json={"code": code, "detail": "no"}, request=request)
    return httpx.HTTPStatusError("no", request=request, response=answer)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a server says to one attempt after another: errors, and then something else."""
    said: list[Any] = []

    def activate(client: Any, request: Any) -> Any:
        found = said.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(FleetHttpClient, "ActivateNode", activate)
    monkeypatch.setattr(reconnect, "PAUSE", 0.0)
    return said


def test_a_refused_node_asks_again(answers: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers += [refusal(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)] * 3 + ["in"]
    reconnect.wait_to_be_let_in()
    assert FleetHttpClient.ActivateNode(None, None) == "in"
    assert capsys.readouterr().err.count("not admitted yet: its key must be admitted there") == 1


def test_a_node_that_is_never_let_in_is_told_why(answers: list[Any]) -> None:
    answers += [refusal(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)] * 2
    reconnect.wait_to_be_let_in(longest=-1.0)
    with pytest.raises(RunError, match="the server does not admit this node: its key must be admitted"):
        FleetHttpClient.ActivateNode(None, None)


def test_other_refusals_are_passed_on_at_once(answers: list[Any]) -> None:
    answers += [refusal(ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL), "in"]
    reconnect.wait_to_be_let_in()
    with pytest.raises(httpx.HTTPStatusError):
        FleetHttpClient.ActivateNode(None, None)


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (RunError("not let in"), RunError, "not let in"),
        (httpx.ConnectError("certificate"), RunError, "no connection to the server: certificate"),
        (None, SystemExit, "1"),
    ],
)
def test_an_exit_of_flower_is_the_error_it_was(cause: Exception | None, kind: type[BaseException], text: str) -> None:
    end = SystemExit(1)
    end.__context__ = cause
    found = reconnect.why(end)
    assert isinstance(found, kind)
    assert str(found) == text


def test_a_node_that_is_stopped_while_it_cannot_connect_ends_well() -> None:
    end = SystemExit(0)
    end.__context__ = httpx.ConnectError("no server")
    assert reconnect.why(end) is end
