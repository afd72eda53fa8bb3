"""Certificates that end soon or have ended: who is told, when, and what to do about it."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from fedprompt.cli import federate
from fedprompt.deploy import certificates, membership, run_node, run_server, status, submit
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.certificates import AUTHORITY_DAYS, SERVER_DAYS, renew_server
from fedprompt.deploy.folders import ServerFolder, SiteFolder, init
from fedprompt.errors import ConfigError, FedpromptError, RunError

pytestmark = pytest.mark.unit

Made = Callable[[float, float], ServerFolder]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A federation whose server's certificate and authority have so many days left, or negative ones."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])

    def make(server: float, authority: float = 3000.0) -> ServerFolder:
        monkeypatch.setattr(certificates, "EARLIER", timedelta(days=AUTHORITY_DAYS - authority))
        folder = init(tmp_path / "fed", Address("localhost", port), ["a"])
        age(folder, server, monkeypatch)
        return folder

    return make


def age(folder: ServerFolder, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a server a certificate with so many days left."""
    monkeypatch.setattr(certificates, "EARLIER", timedelta(days=SERVER_DAYS - left))
    renew_server(folder.path, folder.address.host)


def day(left: float) -> str:
    return f"{datetime.now(UTC) + timedelta(days=left):%Y-%m-%d}"


@pytest.fixture
def showing() -> Iterator[Callable[[ServerFolder], None]]:
    """`showing(folder)` answers at the folder's address with the certificate it has now, and says nothing more."""
    with ExitStack() as stack:

        def show(folder: ServerFolder) -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder.certificate, folder.certificate_key)
            listener = stack.enter_context(socket.create_server(("127.0.0.1", folder.address.port)))

            def serve() -> None:
                with suppress(OSError):
                    while True:
                        caller, _ = listener.accept()
                        with suppress(OSError):
                            context.wrap_socket(caller, server_side=True).close()

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 5)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)

        yield show


def site_of(folder: ServerFolder) -> SiteFolder:
    return SiteFolder.load(folder.path.parent / "sites" / "a")


def expired(left: float, name: str, remedy: str) -> str:
    return f"{name} .*expired on {day(left)}.*: .*{remedy}"


RENEW = "fedprompt federate renew --server"
USES: dict[str, Callable[[ServerFolder], Any]] = {
    "start": run_server.start,
    "status": status.standing,
    "run": lambda folder: submit.submit(folder, "{}"),
    "nodes": membership.nodes,
}


@pytest.mark.parametrize("use", USES)
def test_an_expired_certificate_is_named_with_its_date_and_what_to_do(use: str, made: Made) -> None:
    folder = made(-3, 3000)
    with pytest.raises(ConfigError) as told:
        USES[use](folder)
    assert re.search(expired(-3, r"the server's certificate \(.*server\.pem\)", RENEW), str(told.value))
    assert str(folder.path) in str(told.value)


@pytest.mark.parametrize("use", USES)
def test_an_expired_authority_is_named_with_its_date_and_what_to_do(use: str, made: Made) -> None:
    folder = made(500, -1)
    with pytest.raises(ConfigError, match=expired(-1, r"the authority's certificate \(.*ca\.crt\)", "federate init")):
        USES[use](folder)


def test_a_certificate_of_an_expired_authority_is_not_renewed(made: Made) -> None:
    folder = made(500, -1)
    before = folder.certificate.read_bytes()
    with pytest.raises(ConfigError, match=expired(-1, "the authority's certificate", "federate init")):
        federate.renew(folder.path)
    assert folder.certificate.read_bytes() == before


def test_a_renewed_certificate_that_the_server_has_not_read_is_told(
    made: Made, monkeypatch: pytest.MonkeyPatch, showing: Callable[[ServerFolder], None]
) -> None:
    pytest.importorskip("flwr")
    folder = made(-3, 3000)
    showing(folder)
    age(folder, 800, monkeypatch)
    for use in (membership.nodes, submit.status, lambda each: membership.expel(each, "a")):
        with pytest.raises(RunError, match=rf"uses a certificate that expired on {day(-3)}.*: restart the server"):
            use(folder)


def test_a_site_is_told_that_the_authority_has_expired(made: Made, tmp_path: Path) -> None:
    connection = run_node.Connection.of(site_of(made(500, -1)))
    with pytest.raises(ConfigError, match=expired(-1, "the authority's certificate", "operator of the server")):
        run_node.start(connection, "tiny", tmp_path / "state")


def test_a_site_is_told_that_the_certificate_of_the_server_has_expired(
    made: Made, tmp_path: Path, showing: Callable[[ServerFolder], None]
) -> None:
    folder = made(-3, 3000)
    showing(folder)
    with pytest.raises(RunError, match=expired(-3, "the server's certificate", "operator .* federate renew")):
        run_node.start(run_node.Connection.of(site_of(folder)), "tiny", tmp_path / "state")


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does everything but take part."""
    supernode = pytest.importorskip("fedprompt.engines.flower.supernode")
    monkeypatch.setattr(supernode, "attend", lambda *given, **more: None)
    monkeypatch.setattr("fedprompt.engines.remote.node.Site.check_images", lambda self: None)


@pytest.mark.parametrize(
    ("server", "authority", "told"),
    [(59, 3000, ["the server's certificate"]), (61, 3000, []), (30, 20, ["the authority's", "the server's"])],
)
def test_a_site_is_told_sixty_days_before(
    server: float,
    authority: float,
    told: list[str],
    made: Made,
    tmp_path: Path,
    showing: Callable[[ServerFolder], None],
    attended: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = made(server, authority)
    showing(folder)
    run_node.start(run_node.Connection.of(site_of(folder)), "tiny", tmp_path / "state")
    said = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(said) == len(told)
    for line, name in zip(said, told, strict=True):
        assert name in line
        assert "operator of the server" in line


def test_a_site_whose_server_is_away_starts_all_the_same(made: Made, tmp_path: Path, attended: None) -> None:
    run_node.start(run_node.Connection.of(site_of(made(800, 3000))), "tiny", tmp_path / "state")


def test_what_ended_a_node_is_the_certificate_where_it_expired_meanwhile(
    made: Made,
    tmp_path: Path,
    showing: Callable[[ServerFolder], None],
    attended: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = made(-3, 3000)

    def fails(*given: Any, **more: Any) -> None:
        showing(folder)
        raise RunError("no connection to the server: [SSL: CERTIFICATE_VERIFY_FAILED]")

    monkeypatch.setattr("fedprompt.engines.flower.supernode.attend", fails)
    with pytest.raises(RunError, match=expired(-3, "the server's certificate", "operator .* federate renew")):
        run_node.start(run_node.Connection.of(site_of(folder)), "tiny", tmp_path / "state")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("left", [-3, 1, 59])
def test_the_log_of_a_server_tells_at_the_start_and_every_day(
    left: float, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedprompt.deploy import expiry

    folder, said = made(left, 3000), []
    monkeypatch.setattr(expiry, "DAY", 0.01)
    enough = expiry.watch(lambda: expiry.of_server(folder), said.append)
    assert said, "at the start"
    while len(said) < 4:
        time.sleep(0.01)
    enough.set()
    assert all("the server's certificate" in line and RENEW in line for line in said)
    assert ("expired on" if left < 0 else f"expires on {day(left)}") in said[0]


@pytest.mark.parametrize(("left", "told"), [(61, False), (59, True)])
def test_sixty_days_are_the_notice_for_both(left: float, told: bool, made: Made) -> None:
    from fedprompt.deploy import expiry

    assert [each.warning() is not None for each in expiry.of_server(made(left, left))] == [told, told]


def test_the_status_shows_until_when_certificates_are_good(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(30, 3000)
    monkeypatch.setattr(status, "status", lambda _: submit.Status([], []))
    found = status.standing(folder)
    assert [(each["certificate"], each["until"], each["days"]) for each in found["certificates"]] == [
        (f"the server's certificate ({folder.certificate})", day(30), 29),
        (f"the authority's certificate ({folder.ca_certificate})", day(3000), 2999),
    ]
    assert RENEW in found["certificates"][0]["advice"]
    assert found["certificates"][1]["advice"] == ""
    assert "Certificates" in [str(table.title) for table in status.tables(found)]


def test_errors_of_other_kinds_stay_what_they_are(made: Made) -> None:
    pytest.importorskip("flwr")
    with pytest.raises(FedpromptError, match="no server at localhost"):
        membership.nodes(made(800, 3000))
