"""A page's questions, asked directly and over a server."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedprompt.dashboard import follower, run_list
from fedprompt.dashboard.run_list import Catalogue
from fedprompt.dashboard.server import Dashboard
from fedprompt.dashboard.views import Views

Ask = Callable[..., tuple[int, dict[str, str], bytes]]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests ask more often than a page does."""
    monkeypatch.setattr(follower, "PAUSE", 0.0)
    monkeypatch.setattr(follower, "SHARE", 0.0)
    monkeypatch.setattr(run_list, "SCAN", 0.0)
    monkeypatch.setattr(run_list, "LOOK", 0.0)
    monkeypatch.setattr(run_list, "REST", 0.0)


@pytest.fixture
def views(tmp_path: Path, impatient: None) -> Views:
    return Views(Catalogue([tmp_path]))


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """`ask("/api/runs")` of a server on a free port: status, headers and body."""
    with Dashboard([tmp_path], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()

        def make(path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response.status, dict(response.getheaders()), content

        yield make
        server.shutdown()
        thread.join()
