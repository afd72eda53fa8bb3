"""What the server answers, and whom it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dashboard_support import write

from fedprompt.dashboard.server import LONGEST_PATH, PORT, Dashboard, is_expected, pages
from fedprompt.errors import ConfigError

pytestmark = pytest.mark.unit

Ask = Callable[..., tuple[int, dict[str, str], bytes]]


def test_the_page_and_its_files_are_served_with_their_types(ask: Ask) -> None:
    for path, kind in (("/", "text/html"), ("/static/app.js", "text/javascript"), ("/static/style.css", "text/css")):
        status, headers, body = ask(path)
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, kind)
        assert body


def test_every_answer_forbids_what_the_page_does_not_need(ask: Ask) -> None:
    for path in ("/", "/api/runs", "/nothing"):
        _, headers, _ = ask(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")


def test_the_page_has_no_script_or_style_of_its_own_and_asks_nobody_else() -> None:
    for path, (_, content) in pages().items():
        text = content.decode()
        assert "https://" not in text, path
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), path
        assert not any(
            word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        ), path
    html = pages()["/"][1].decode()
    assert "<style" not in html
    assert " style=" not in html
    assert html.count("<script") == html.count('<script type="module" src=')


def test_runs_are_told_as_json(tmp_path: Path, ask: Ask) -> None:
    write(tmp_path / "run", [[5]])
    status, headers, body = ask("/api/runs")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    (entry,) = json.loads(body)["changed"]
    for question in ("run", "clients", "settings"):
        assert ask(f"/api/{question}?id={entry['id']}")[0] == 200


def test_no_text_of_an_answer_holds_what_cannot_be_seen(tmp_path: Path, ask: Ask) -> None:
    write(tmp_path / "a\x1b[2J\u202eb", [[5]])
    (entry,) = json.loads(ask("/api/runs")[2])["changed"]
    for question in ("runs", f"run?id={entry['id']}", f"settings?id={entry['id']}", f"compare?ids={entry['id']}"):
        status, _, body = ask(f"/api/{question}")
        assert status == 200
        assert b"\\u001b" not in body
        assert b"\\u202e" not in body


def test_head_tells_the_length_and_nothing_else(ask: Ask) -> None:
    status, headers, body = ask("/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len(ask("/")[2])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(method: str, ask: Ask) -> None:
    status, headers, _ = ask("/api/runs", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "//etc/passwd",
        "/static/",
        "/static/app.js/",
        "/api/",
        "/api/_entry",
        "/api/catalogue",
        "/api/run/../runs",
    ],
)
def test_no_path_leads_to_another_file(path: str, ask: Ask) -> None:
    assert ask(path)[0] == 404


def test_a_question_about_no_run_is_answered_so(ask: Ask) -> None:
    status, _, body = ask("/api/run?id=../../secret")
    assert (status, json.loads(body)["error"][:22]) == (404, "there is no such run; ")


def test_questions_that_make_no_sense_are_refused(ask: Ask) -> None:
    session = json.loads(ask("/api/runs")[2])["session"]
    assert ask(f"/api/runs?session={session}&after=x")[0] == 400
    assert ask(f"/api/runs?session={session}&after={'9' * 30}")[0] == 400
    assert ask("/api/runs?" + "&".join(f"a{number}=1" for number in range(30)))[0] == 400
    assert ask("/api/compare?ids=" + "x," * LONGEST_PATH)[0] == 414


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8050", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1"]
)
def test_another_name_for_this_machine_is_refused(name: str, ask: Ask) -> None:
    assert ask("/api/runs", Host=name)[0] == 403
    assert ask("/", Host=name)[0] == 403


@pytest.mark.parametrize("name", ["127.0.0.1", "127.0.0.1:9", "localhost:8050", "LOCALHOST", "[::1]:8050"])
def test_names_of_loopback_are_served_also_through_a_tunnel(name: str, ask: Ask) -> None:
    assert ask("/api/runs", Host=name)[0] == 200


def test_an_address_of_the_network_is_expected_only_where_the_server_listens_there() -> None:
    assert not is_expected("192.0.2.1:8050", "127.0.0.1")
    assert is_expected("192.0.2.1:8050", "0.0.0.0")
    assert is_expected("my-machine:8050", "My-Machine")
    assert not is_expected("my-machine:8050", "0.0.0.0")
    assert not is_expected(None, "127.0.0.1")


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_pages_elsewhere_cannot_ask(site: str, status: int, ask: Ask) -> None:
    assert ask("/api/runs", Sec_Fetch_Site=site)[0] == status


def test_a_request_with_a_body_ends_its_connection(ask: Ask) -> None:
    assert ask("/api/runs", Content_Length="5")[1]["Connection"] == "close"


def test_a_port_that_is_taken_is_an_error_only_where_it_was_asked_for(tmp_path: Path) -> None:
    with Dashboard([tmp_path], port=0) as first:
        taken = int(first.server_address[1])
        with pytest.raises(ConfigError, match=rf"--port must be free \(Address already in use\), got {taken}"):
            Dashboard([tmp_path], port=taken)
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", PORT))
            other.listen()
        except OSError:
            pass  # somebody else has it, which is as good
        with Dashboard([tmp_path]) as second:
            assert second.server_address[1] not in (0, PORT)


def test_a_host_that_is_none_of_ours_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host must be an address of this machine"):
        Dashboard([tmp_path], "192.0.2.1", 0)


def started(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedprompt.cli", "dashboard", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_the_command_cleanly_and_the_folder_may_come_later(tmp_path: Path) -> None:
    process = started("--port", "0", cwd=tmp_path)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert line.startswith("dashboard of runs: http://127.0.0.1:")
    assert (process.returncode, errors) == (0, "dashboard ended\n")
    assert not os.listdir(tmp_path)


def test_a_warning_is_given_where_others_can_reach_the_page(tmp_path: Path) -> None:
    process = started("--port", "0", "--host", "0.0.0.0", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert "WARNING: there is no login" in process.communicate(timeout=60)[1]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    process = started("nowhere", cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.startswith("error: run: 'nowhere' must be")) == (5, True)


def test_the_dashboard_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, fedprompt.dashboard.serve; print(sorted({'torch', 'matplotlib', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
