"""`fedprompt node --check`, `waiting` and `approve`: what a site's people are told before it matters."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("cryptography")

from fedprompt.cli import app
from fedprompt.config import parse
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.check_site import Finding, check_site
from fedprompt.deploy.folders import SiteFolder, init
from fedprompt.engines.remote.run_records import RunRecord
from fedprompt.errors import ConfigError

pytestmark = pytest.mark.unit

CONFIG: dict[str, Any] = {
    "name": "wish",
    "data": {"source": "tiny"},
    "backbone": {"name": "tiny"},
    "federation": {"rounds": 2},
}


class Answering(http.server.BaseHTTPRequestHandler):
    """A server that is well, with the clock it is given."""

    apart = 0.0

    def do_GET(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", formatdate(time.time() + type(self).apart, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def folder(tmp_path: Path, port: int, secure: bool = False) -> SiteFolder:
    init(tmp_path / "fed", Address("127.0.0.1", port), ["hospital"], secure)
    return SiteFolder.load(tmp_path / "fed" / "sites" / "hospital")


def found(site: SiteFolder, tmp_path: Path, *configs: dict[str, Any], data: str = "tiny") -> dict[str, list[Finding]]:
    rows: dict[str, list[Finding]] = {}
    for each in check_site(site, data, tmp_path / "state", [parse(config) for config in configs]):
        rows.setdefault(each.what, []).append(each)
    return rows


def test_all_is_well_with_a_run_that_the_policy_allows(tmp_path: Path, port: int) -> None:
    rows = found(folder(tmp_path, port), tmp_path, CONFIG)
    assert all(each.fine for group in rows.values() for each in group), rows
    assert set(rows) == {"name", "server", "clock", "policy", "data", "budget", "wish-fedvpt-seed0"}


def test_every_reason_to_refuse_a_run_is_told(tmp_path: Path, port: int) -> None:
    site = folder(tmp_path, port)
    (site.path / "policy.yaml").write_text("least_noise: 1.0\nmost_rounds: 1\nmethods: [head_tune]\n")
    told = [each.text for each in found(site, tmp_path, CONFIG)["wish-fedvpt-seed0"]]
    assert len(told) == 3
    assert all(text.startswith("would be refused (") for text in told)
    assert "method.name must be one of head_tune here" in told[0]
    (site.path / "policy.yaml").write_text("least_test_images: 1000000\n")
    (row,) = found(site, tmp_path, CONFIG)["wish-fedvpt-seed0"]
    assert "(evaluation): test images must be 1000000" in row.text
    single = {**CONFIG, "method": {"name": "pep_fedpt"}}
    (site.path / "policy.yaml").unlink()
    assert "minimum_count" in found(site, tmp_path, single)["wish-pep_fedpt-seed0"][0].text


def test_nothing_is_begun_by_looking(tmp_path: Path, port: int) -> None:
    found(folder(tmp_path, port), tmp_path, CONFIG)
    assert not (tmp_path / "state" / "states").exists()


def test_a_clock_a_key_images_and_a_policy_that_are_not_well_are_told(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = folder(tmp_path, port)
    monkeypatch.setattr(Answering, "apart", 3600.0)
    (clock,) = found(site, tmp_path)["clock"]
    assert (clock.fine, clock.text.startswith(("3600 s", "3599 s", "3601 s"))) == (False, True)
    (data,) = found(site, tmp_path, data=str(tmp_path / "nowhere"))["data"]
    assert (data.fine, "--data must be" in data.text) == (False, True)
    (site.path / "policy.yaml").write_text("evaluate: sometimes")
    (policy,) = found(site, tmp_path)["policy"]
    assert (policy.fine, "evaluate must" in policy.text) == (False, True)


def test_the_way_to_the_server_and_the_key_are_looked_at(tmp_path: Path, port: int) -> None:
    """What answers here speaks no TLS, which a secure folder demands; and the key is another one's."""
    site = folder(tmp_path, port, secure=True)
    rows = found(site, tmp_path)
    assert rows["key"][0].fine
    assert not rows["TLS"][0].fine
    other = folder(tmp_path / "other", port, secure=True)
    site.key.write_bytes(other.key.read_bytes())
    (key,) = found(site, tmp_path)["key"]
    assert (key.fine, "must be a key pair" in key.text) == (False, True)


def test_the_commands_say_it_and_end_with_a_code(tmp_path: Path, port: int) -> None:
    site, config = folder(tmp_path, port), tmp_path / "wish.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    shell = CliRunner()
    own = ["--site", str(site.path), "--data", "tiny"]
    well = shell.invoke(app, ["node", *own, "--insecure", "--check", "--config", str(config)])
    assert (well.exit_code, "ok  wish-fedvpt-seed0" in well.output) == (0, True), well.output
    same = shell.invoke(app, ["federate", "check", str(config), *own])
    assert (same.exit_code, "ok  wish-fedvpt-seed0" in same.output) == (0, True), same.output
    bad = shell.invoke(app, ["federate", "check", str(config), *own, "federation.rounds=20000"])
    assert isinstance(bad.exception, ConfigError)
    assert (
        "NO  wish-fedvpt-seed0: would be refused (policy): federation.rounds must be at most 10000 here" in bad.output
    )
    for wrong in (["node", *own, "--insecure", "--config", str(config)], ["node", "--site", str(site.path)]):
        assert isinstance(shell.invoke(app, wrong).exception, ConfigError)


def test_waiting_runs_are_shown_and_approved(tmp_path: Path, port: int) -> None:
    site, shell, run = folder(tmp_path, port), CliRunner(), "a" * 32
    record = RunRecord(site.path / "state", run)
    record.wait({"site": "hospital", "config": CONFIG})
    shown = shell.invoke(app, ["node", "waiting", str(site.path)])
    assert (shown.exit_code, run in shown.output, "rounds: 2" in shown.output) == (0, True, True)
    assert shell.invoke(app, ["node", "approve", str(site.path), run]).exit_code == 0
    assert record.approved is not None
    assert isinstance(shell.invoke(app, ["node", "approve", str(site.path), run]).exception, ConfigError)
