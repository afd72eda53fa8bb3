"""The gate before Flower's SuperLink: what other machines may reach, and who counts as one."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedprompt.engines.flower import superlink
from fedprompt.engines.flower.superlink import Flight, Gate, NoRoom, failures_only

pytestmark = pytest.mark.unit

STRANGER, SERVER = ("198.51.100.7", 50000), ("192.0.2.10", 9092)


def passed(
    path: str, client: Any = STRANGER, kind: str = "http", body: list[int] | None = None, own: bool = False, **more: Any
) -> list[dict[str, Any]] | None:
    """What the gate sends back; None where it let the request through, with its whole body in parts of so many bytes."""
    sent: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": bytes(size), "more_body": True} for size in body or []]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    through = False

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal through
        through = True
        if body is not None:
            arrived = [await receive() for _ in range(len(body) + 1)]
            assert [len(part["body"]) for part in arrived] == [*body, 0]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return parts.pop(0)

    scope = {"type": kind, "path": path, "client": client, "server": SERVER, "headers": [], "root_path": ""} | more
    asyncio.run(Gate(application, own)(scope, receive, send))
    assert through == (not sent)
    return sent or None


@pytest.mark.parametrize("path", ["/health", "/v1/fleet/pull-messages", "/v1/fleet/register-node"])
def test_other_machines_reach_what_nodes_need(path: str) -> None:
    assert passed(path) is None


@pytest.mark.parametrize("host", [STRANGER[0], "127.0.0.1"])
def test_a_request_to_a_route_of_nodes_has_a_size(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on this machine: it has nodes too, and who else is there has no business on these routes."""
    monkeypatch.setattr(superlink, "SMALL_REQUEST", 100)
    assert passed("/v1/fleet/push-object", (host, 5), body=[60, 40]) is None
    start, _ = passed("/v1/fleet/push-object", (host, 5), body=[60, 41, 10**6]) or []
    assert start["status"] == 413
    long = [(b"content-length", b"101")]
    start, _ = passed("/v1/fleet/push-object", (host, 5), body=[60, 40], headers=long) or []
    assert start["status"] == 413
    assert passed("/v1/control/start-run", ("127.0.0.1", 5), body=[60, 41], headers=long) is None


def test_a_request_to_a_route_of_nodes_says_how_long_it_is() -> None:
    start, _ = passed("/v1/fleet/push-object", headers=[(b"Transfer-Encoding", b"chunked")]) or []
    assert start["status"] == 411


@pytest.mark.parametrize("size", [2**20, 2**28])
def test_who_proves_to_be_a_node_may_send_large_requests(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def proven(app: Any, scope: Any) -> bytes:
        return b"key"

    monkeypatch.setattr(superlink, "proven_key", proven)
    assert passed("/v1/fleet/push-object", headers=[(b"content-length", str(size).encode())], body=[10]) is None
    start, _ = passed("/v1/fleet/push-object", headers=[(b"content-length", str(2**28 + 1).encode())], body=[10]) or []
    assert start["status"] == 413


def test_a_body_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "PATIENCE", 0.05)
    sent: list[Any] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def nobody(*_: Any) -> None:
        raise AssertionError("it must not come so far")

    scope = {"type": "http", "path": "/v1/fleet/push-object", "client": STRANGER, "server": SERVER, "headers": []}
    asyncio.run(Gate(nobody)(scope, never, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


def test_large_requests_of_all_nodes_together_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one node can take no more than its share of it; the others get through meanwhile."""
    monkeypatch.setattr(superlink, "TURN", 0.05)
    most, flight, order = superlink.LARGEST_REQUEST, Flight(), []

    async def took(key: bytes, size: int) -> bool:
        try:
            async with flight.room_for(key, size):
                return True
        except NoRoom:
            return False

    async def waits() -> None:
        async with flight.room_for(b"c", most):
            order.append("c")

    async def scene() -> None:
        async with flight.room_for(b"a", most):
            assert not await took(b"a", 2**20), "its share is taken"
            assert await took(b"a", 100), "small ones are free"
            async with flight.room_for(b"b", most):
                assert not await took(b"c", 2**20), "all is taken"
                monkeypatch.setattr(superlink, "TURN", 20.0)
                later = asyncio.create_task(waits())
                await asyncio.sleep(0)
                order.append("b")
            await later
        assert order == ["b", "c"]
        assert await took(b"a", most)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/docs",
        "/openapi.json",
        "/",
        "",
        "//v1/control/start-run",
        "//v1/fleet/pull-messages",
        "/v1/fleet",
        "/v1/fleet/",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/x/../../control/start-run",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/pull-messages\n",
        "/V1/Fleet/pull-messages",
        "/health/../v1/control/start-run",
        "/HEALTH",
    ],
)
def test_other_machines_reach_nothing_else(path: str) -> None:
    start, body = passed(path) or []
    assert (start["status"], start["type"]) == (403, "http.response.start")
    assert "other machines" in json.loads(body["body"])["detail"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_this_machine_reaches_everything(host: str) -> None:
    assert passed("/v1/control/start-run", (host, 50000)) is None


@pytest.mark.parametrize("host", [SERVER[0], f"::ffff:{SERVER[0]}"])
def test_its_own_address_is_this_machine_only_where_the_server_listens_there_alone(host: str) -> None:
    """Forwarders of rootless containers call with the container's own address on behalf of anyone."""
    assert passed("/v1/control/start-run", (host, 50000), own=True) is None
    assert passed("/v1/control/start-run", (host, 50000)) is not None
    assert passed("/v1/control/start-run", own=True) is not None


@pytest.mark.parametrize(
    "client", [None, ("", 0), ("unix", 0), ("192.0.2.11", 9092), ("::ffff:198.51.100.7", 1), ("::", 1)]
)
def test_who_cannot_be_told_to_be_this_machine_is_not(client: Any) -> None:
    assert passed("/v1/control/start-run", client) is not None


@pytest.mark.parametrize(
    "header", [b"x-forwarded-for", b"X-Forwarded-For", b"forwarded", b"via", b"x-real-ip", b"origin"]
)
def test_what_came_through_a_proxy_or_a_browser_is_not_of_this_machine(header: bytes) -> None:
    headers = [(b"host", b"localhost"), (header, b"127.0.0.1")]
    assert passed("/v1/control/start-run", ("127.0.0.1", 1), headers=headers) is not None
    assert passed("/v1/fleet/pull-messages", ("127.0.0.1", 1), headers=headers) is None


def test_a_prefix_that_the_router_would_strip_opens_nothing() -> None:
    assert passed("/v1/fleet/pull-messages", root_path="/v1/fleet") is not None


def test_websockets_of_other_machines_are_closed() -> None:
    assert passed("/v1/fleet/pull-messages", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert passed("/v1/control/any", ("::1", 1), kind="websocket") is None


def test_the_lifespan_of_the_application_passes() -> None:
    assert passed("", None, kind="lifespan") is None


@pytest.mark.parametrize(("status", "kept"), [(200, False), (204, False), (401, True), (500, True)])
def test_the_log_keeps_refused_requests_only(status: int, kept: bool) -> None:
    arguments = ("127.0.0.1:1", "POST", "/v1/fleet/pull-messages", "1.1", status)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)
    assert failures_only(record) is kept
