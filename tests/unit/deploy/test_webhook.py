"""Notices: what is sent, to whom, and that a web hook that fails disturbs nobody."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fedprompt.deploy import webhook
from fedprompt.deploy.webhook import KINDS, NotifyConfig, Webhook, load_notify
from fedprompt.errors import ConfigError

pytestmark = pytest.mark.unit

SECRET = "T0K3N-in-the-address"


class Hook(ThreadingHTTPServer):
    """A web hook on loopback that keeps what it gets."""

    daemon_threads = True

    def __init__(self, status: int = 200, wait: float = 0.0, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Hooked)
        self.status, self.wait, self.location = status, wait, location
        self.got: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{SECRET}"


class _Hooked(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        time.sleep(self.server.wait)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(b"x" * 2**20)  # which nobody reads

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hooks() -> Iterator[Any]:
    made: list[Hook] = []

    def hook(**options: Any) -> Hook:
        made.append(Hook(**options))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return made[-1]

    yield hook
    for each in made:
        each.shutdown()
        each.server_close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "PAUSE", 0.01)
    monkeypatch.setattr(webhook, "PATIENCE", 0.5)


def settled(sender: Webhook, notices: int) -> None:
    end = time.monotonic() + 20
    while sender.sent + sender.failed < notices:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_notice_holds_what_happened_and_nothing_else(hooks: Any) -> None:
    hook = hooks()
    sender = Webhook(NotifyConfig(notify=hook.address))
    sender.tell("refused", "the update of a was\nrefused " + "y" * 10**5, run="first", site="a", round=3)
    settled(sender, 1)
    (notice,) = hook.got
    assert notice.keys() == {"event", "text", "run", "site", "round", "time"}
    assert (notice["event"], notice["run"], notice["site"], notice["round"]) == ("refused", "first", "a", 3)
    assert notice["text"].startswith("the update of a was refused yyy")
    assert len(notice["text"]) == webhook.LONGEST_TEXT
    assert SECRET not in json.dumps(notice)


def test_only_what_is_wanted_is_sent(hooks: Any) -> None:
    hook = hooks()
    sender = Webhook(NotifyConfig(notify=hook.address, events=["finished"]))
    sender.tell("absent", "a is gone")
    sender.tell("finished", "done")
    settled(sender, 1)
    assert [notice["event"] for notice in hook.got] == ["finished"]


def test_nothing_is_sent_without_an_address() -> None:
    sender = Webhook(None)
    for kind in KINDS:
        sender.tell(kind, "x")
    assert (sender.sent, sender.failed) == (0, 0)


@pytest.mark.parametrize(
    ("options", "tries", "reason"),
    [({"status": 500}, 3, "status 500"), ({"status": 404}, 1, "status 404"), ({"wait": 2.0}, 3, "TimeoutError")],
)
def test_a_web_hook_that_fails_is_a_line_of_the_log_without_its_address(
    options: dict[str, Any], tries: int, reason: str, hooks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = hooks(**options)
    sender = Webhook(NotifyConfig(notify=hook.address))
    begin = time.monotonic()
    sender.tell("absent", "a is gone")
    assert time.monotonic() - begin < 0.4, "nobody waits for it"
    settled(sender, 1)
    assert (sender.failed, len(hook.got)) == (1, tries)
    said = capsys.readouterr().err
    assert f"the web hook did not take a notice of 'absent': {reason}" in said
    assert SECRET not in said


def test_nobody_there_is_the_same() -> None:
    sender = Webhook(NotifyConfig(notify="http://127.0.0.1:9/x"))
    sender.tell("absent", "a is gone")
    settled(sender, 1)
    assert sender.failed == 1


def test_a_notice_is_not_sent_on_to_somebody_else(hooks: Any) -> None:
    other = hooks()
    hook = hooks(status=307, location=other.address)
    sender = Webhook(NotifyConfig(notify=hook.address))
    sender.tell("absent", "a is gone")
    settled(sender, 1)
    assert (len(hook.got), other.got, sender.failed) == (1, [], 1)


def test_too_many_notices_are_dropped(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "WAITING", 3)
    hook = hooks(wait=0.3)
    sender = Webhook(NotifyConfig(notify=hook.address))
    for _ in range(10):
        sender.tell("absent", "a is gone")
    settled(sender, 10)
    assert 1 <= sender.sent <= 4
    assert sender.sent + sender.failed == 10


@pytest.mark.parametrize(
    "text",
    [
        f"notify: http://example.org/{SECRET}",
        f"notify: file:///etc/{SECRET}",
        f"notify: {SECRET}",
        f"notify: https:///{SECRET}",
        f"notify: https://example.org/{SECRET}\nevents: [{SECRET}]",
        f"notify: https://example.org/{SECRET}\nmore: 1",
        f"notify: [{SECRET}",
    ],
)
def test_an_address_that_is_none_is_refused_without_showing_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "notify.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"notify\.yaml") as refused:
        load_notify(tmp_path)
    assert SECRET not in str(refused.value)


def test_the_file_may_be_missing(tmp_path: Path) -> None:
    assert load_notify(tmp_path) is None
    (tmp_path / "notify.yaml").write_text("notify: https://hooks.example.org/x\nevents: [absent]\n")
    found = load_notify(tmp_path)
    assert found is not None
    assert found.events == ["absent"]


def test_a_notice_to_this_machine_takes_no_proxy(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy of the environment read the address, which is a secret, and the notice, without TLS."""
    proxy, hook = hooks(), hooks()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
    sender = Webhook(NotifyConfig(notify=hook.address))
    sender.tell("finished", "done")
    settled(sender, 1)
    assert proxy.got == []
    assert len(hook.got) == 1


def test_an_answer_that_drips_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header without end, a letter at a time: no notice was sent any more, and none counted as failed."""
    monkeypatch.setattr(webhook, "ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = Webhook(NotifyConfig(notify=f"http://127.0.0.1:{listening.getsockname()[1]}/{SECRET}"))
        sender.tell("finished", "done")
        slow, _ = listening.accept()
        with slow, contextlib.suppress(OSError):
            slow.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            for _ in range(100):
                slow.sendall(b"x")
                time.sleep(0.05)
            pytest.fail("it still listens")
        settled(sender, 1)
