"""The dashboard's page of a federation: its answer with and without a running server."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from remote_run import run_remotely, tiny_settings

from fedprompt.dashboard.server import Dashboard
from fedprompt.deploy import federation_page
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.federation_page import FederationPage
from fedprompt.deploy.folders import ServerFolder
from fedprompt.errors import RunError

pytestmark = pytest.mark.unit


@dataclass
class Node:
    name: str
    status: str
    since: str = "2026-11-19T14:50:00+00:00"
    id: int = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ServerFolder:
    made = ServerFolder.create(tmp_path_factory.mktemp("page") / "server", Address("127.0.0.1", 1), secure=False)
    made.runs.mkdir()
    run_remotely(tiny_settings(made.runs, "paged", federation={"rounds": 1}))
    return made


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The nodes of the server; an exception if it does not run."""
    found: list[Any] = [Node("client_0", "online"), Node("client_1", "offline"), Node("", "registered")]

    def nodes(folder: ServerFolder) -> list[Any]:
        if isinstance(found[0], Exception):
            raise found[0]
        return found

    monkeypatch.setattr(federation_page, "nodes", nodes)
    monkeypatch.setattr(federation_page, "FRESH", -1.0)
    return found


def test_the_page_knows_sites_run_and_certificates(folder: ServerFolder, present: list[Any]) -> None:
    told = FederationPage(folder).answer()
    json.dumps(told, allow_nan=False)
    assert [(site["name"], site["status"]) for site in told["sites"]] == [
        ("client_0", "online"),
        ("client_1", "offline"),
        ("node 7", "registered"),
    ]
    assert told["answers"] is True
    assert (told["run"]["name"], told["run"]["round"], told["run"]["rounds"]) == ("paged-fedvpt-seed0", 1, 1)
    assert 0 <= told["run"]["worst"] <= told["run"]["average"] <= 1
    assert told["sites"][0]["last_round"] == 1
    assert (told["incidents"], told["certificates"], told["run"]["refused"]) == ([], [], 0)


def test_a_server_that_is_away_is_said_and_the_sites_are_still_known(folder: ServerFolder, present: list[Any]) -> None:
    page = FederationPage(folder)
    page.answer()
    present[:] = [RunError("no server at 127.0.0.1:1")]
    told = page.answer()
    assert told["answers"] is False
    assert told["problem"] == "no server at 127.0.0.1:1"
    assert [site["status"] for site in told["sites"]] == ["unknown"] * 3
    assert told["run"]["round"] == 1


@pytest.fixture
def asked(folder: ServerFolder, present: list[Any]) -> Iterator[Any]:
    made: list[Dashboard] = []

    def ask(path: str, **options: Any) -> tuple[int, Any]:
        if not made:
            made.append(Dashboard([folder.runs], port=0, **options))
            threading.Thread(target=made[0].serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", made[0].server_address[1], timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    yield ask
    for each in made:
        each.shutdown()
        each.server_close()


def test_the_dashboard_has_the_page_where_there_is_a_federation(asked: Any, folder: ServerFolder) -> None:
    page = FederationPage(folder).answer
    assert asked("/api/about", federation=page) == (200, {"federation": True})
    status, told = asked("/api/federation")
    assert status == 200
    ids = {entry["id"] for entry in asked("/api/runs")[1]["changed"]}
    assert told["run"]["id"] in ids, "the link leads to the run"


def test_the_dashboard_has_no_such_page_otherwise(asked: Any) -> None:
    assert asked("/api/about") == (200, {"federation": False})
    assert asked("/api/federation")[0] == 404


def test_the_command_needs_the_folder_of_a_server(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedprompt.cli import app
    from fedprompt.errors import ConfigError

    done = CliRunner().invoke(app, ["dashboard", "--server", str(tmp_path)])
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError) or "federation.json" in done.output
