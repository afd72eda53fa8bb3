"""What is handed to Flower, and what its answers mean."""

from __future__ import annotations

import json
import socket
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedprompt.deploy import flower_cli, membership, submit
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.folders import ServerFolder, SiteFolder, init
from fedprompt.deploy.health import answers, keeps_strangers_out
from fedprompt.deploy.submit import RunState
from fedprompt.errors import ConfigError, DataError, QuorumError, RunError

pytestmark = pytest.mark.unit


def ended(status: str, details: str = "") -> RunState:
    return RunState(7, status, details, "", "", "")


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    """A federation whose server does not run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return init(tmp_path / "fed", Address("127.0.0.1", port), ["a"])


@pytest.mark.parametrize("resume", [True, False])
def test_the_app_carries_the_config_and_no_code(resume: bool) -> None:
    config = json.dumps({"name": 'ä "quoted" \\ 漢', "long": "x" * 20000}, ensure_ascii=False)
    app = tomllib.loads(submit.app_text(config, resume))
    assert app["tool"]["flwr"]["app"]["config"] == {"config": config, "resume": resume}
    assert set(app["tool"]["flwr"]["app"]["components"].values()) == {
        "fedprompt.deploy.server_app:server_app",
        "fedprompt.deploy.server_app:client_app",
    }
    assert app["project"]["dependencies"] == []


@pytest.mark.parametrize("prefix", ["", "ServerApp failed with exception: "])
@pytest.mark.parametrize("kind", [ConfigError, DataError, QuorumError])
def test_an_error_of_the_server_is_the_same_error_here(prefix: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        ended("finished:failed", f"{prefix}{kind.__name__}: rounds must be 1: got 0\nsecond line").check()
    assert type(caught.value) is kind
    assert str(caught.value) == "rounds must be 1: got 0\nsecond line"


@pytest.mark.parametrize("details", ["", "KeyError: 'x'", "broken: no class of errors", "SystemExit", "annotations: x"])
def test_any_other_failure_is_an_error_of_the_run(details: str) -> None:
    with pytest.raises(RunError, match="run 7 failed on the server: "):
        ended("finished:failed", details).check()


def test_a_stopped_run_says_how_to_go_on() -> None:
    with pytest.raises(RunError, match="run 7 was stopped; continue it with --resume"):
        ended("finished:stopped").check()


@pytest.mark.parametrize("status", ["finished:completed", "running", "pending"])
def test_a_run_without_fault_raises_nothing(status: str) -> None:
    ended(status).check()


def test_a_config_beyond_measure_is_refused(server: ServerFolder) -> None:
    with pytest.raises(ConfigError, match="config must have at most 1048576 characters, got 1048577"):
        submit.submit(server, " " * (2**20 + 1))


def test_a_server_that_is_not_there_is_told_by_address_and_command(server: ServerFolder) -> None:
    pytest.importorskip("flwr")
    said = f"no server at {server.address}; start it with `fedprompt server {server.path}`"
    for question in (lambda: submit.state(server, 1), lambda: membership.nodes(server)):
        with pytest.raises(RunError) as caught:
            question()
        assert str(caught.value) == said
    assert not answers(server)
    assert not keeps_strangers_out(server)


def test_a_program_that_hangs_is_given_up(
    server: ServerFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(tmp_path, monkeypatch, "exec sleep 60")
    with pytest.raises(RunError, match=r"`flwr list` gave no answer within 0\.2 s"):
        flower_cli.ask(server, "list", patience=0.2)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no json; echo what went wrong >&2; exit 1", "`flwr list` failed with exit code 1: what went wrong"),
        ("echo '[1]'", r"`flwr list` failed with exit code 0: \[1\]"),
        (
            """printf '%s' '{"success": false, "error-message": "Using it\\n\\n[code: 16] Run ID not found."}'""",
            "Flower: .code: 16. Run ID not found",
        ),
    ],
    ids=["text", "list", "refused"],
)
def test_a_program_that_fails_is_quoted(
    server: ServerFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    _pretend(tmp_path, monkeypatch, script)
    with pytest.raises(RunError, match=said):
        flower_cli.ask(server, "list")


def test_programs_of_flower_are_quiet_at_home_and_find_each_other(
    server: ServerFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "intern.example")
    names = (
        "FLWR_TELEMETRY_ENABLED FLWR_DISABLE_UPDATE_CHECK RAY_USAGE_STATS_ENABLED FLWR_HOME FEDPROMPT_SERVER NO_PROXY"
    )
    shown = ", ".join(f'\\"{name}\\": \\"${name}\\"' for name in names.split())
    _pretend(tmp_path, monkeypatch, f'echo "{{\\"success\\": true, {shown}}}"')
    answer = flower_cli.ask(server, "list")
    assert [answer[name] for name in names.split()] == [
        "0",
        "1",
        "0",
        str(server.path / "flwr"),
        str(server.path),
        "intern.example,localhost,127.0.0.1,::1",
    ]
    assert flower_cli.environment(server)["PATH"].startswith(str(tmp_path / "bin"))


def test_sites_are_admitted_and_expelled_while_no_server_runs(server: ServerFolder, tmp_path: Path) -> None:
    other = SiteFolder.create(tmp_path / "b", "b", server)
    membership.admit(server, "b", other.public_key)
    assert list(server.public_keys()) == ["a", "b"]
    membership.expel(server, "a")
    assert list(server.public_keys()) == ["b"]
    with pytest.raises(ConfigError, match=r"public key file .* must be readable"):
        membership.admit(server, "c", tmp_path / "missing.pub")
    (tmp_path / "large.pub").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="must have at most 4096 bytes"):
        membership.admit(server, "c", tmp_path / "large.pub")


def test_a_server_that_cannot_be_told_leaves_the_list_of_sites_as_it_was(
    server: ServerFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: ServerFolder) -> dict[str, str]:
        raise RunError("no server")

    other = SiteFolder.create(tmp_path / "b", "b", server)
    monkeypatch.setattr(membership, "is_running", lambda folder: True)
    monkeypatch.setattr(membership, "reconcile", fails)
    before = {name: path.read_bytes() for name, path in server.public_keys().items()}
    for change in (lambda: membership.expel(server, "a"), lambda: membership.admit(server, "b", other.public_key)):
        with pytest.raises(RunError, match="no server"):
            change()
        assert {name: path.read_bytes() for name, path in server.public_keys().items()} == before


def _pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of ours where `flwr` is looked for."""
    program = tmp_path / "bin" / "flwr"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program.parent / "python"))
    monkeypatch.setattr(flower_cli, "check_installed", lambda: None)
