"""/metrics and /ready: the figures, that labels hold no private names, who may ask, and what a watch tells."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from remote_run import SiteRecorder, exported, sites_with, tiny_settings

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from fedprompt.core.messages import Failure
from fedprompt.deploy import operator_listener
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.expiry import SERVER, Term
from fedprompt.deploy.federation_state import FederationState, Incident, Observed, RunState, SiteState, run_state
from fedprompt.deploy.folders import ServerFolder
from fedprompt.deploy.metrics import NodeFigures, ServerFigures, exposition, of_server
from fedprompt.deploy.operator_listener import check_metrics_address, listening
from fedprompt.deploy.watch_server import Watch
from fedprompt.engines.remote.protocol import Order
from fedprompt.errors import ConfigError, RunError
from fedprompt.experiment.sites import SitesExperiment

pytestmark = pytest.mark.unit

ABSENT = 1  # the client that misses round 2


class Missing(SiteRecorder):
    """One site misses one round."""

    def deliver(self, orders: Any) -> Any:
        for client, order in list(orders):
            if (client, Order.from_bytes(order).train) == (ABSENT, 2):
                yield client, Failure(client, "deadline", "must answer within 5 s")
            else:
                yield from super().deliver([(client, order)])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServerFolder, Missing, Any]:
    """A server's folder with a run in it, its sites, and the names that must stay out of labels."""
    ground = tmp_path_factory.mktemp("served")
    folder = ServerFolder.create(ground / "server", Address("127.0.0.1", 1), secure=False)
    folder.runs.mkdir()
    settings = tiny_settings(
        folder.runs, "watched", engine={"kind": "flower"}, federation={"rounds": 3, "evaluate_every": 3}
    )
    files = exported({**settings, "engine": {}}, ground / "patient-0042")
    post = Missing(sites_with(files, ground / "sites"))
    experiment = SitesExperiment(settings)
    experiment.federate(post)
    source = experiment.factory.prepare()[0]
    return folder, post, [*source.class_names, *source.domain_names, "patient-0042", *map(str, files.values())]


def nodes(folder: Any, online: bool = True) -> list[Any]:
    status = "online" if online else "offline"
    return [SimpleNamespace(id=place, name=f"client_{place}", status=status, since="x") for place in range(4)]


def scraped(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_the_figures_of_a_server_are_those_of_its_run_file(served: Any) -> None:
    folder, _, _ = served
    state = Observed(folder).state(nodes(folder))
    assert state.run is not None
    found = scraped(exposition(of_server(state, ready=True)))
    run = ("run", "watched-fedvpt-seed0")
    assert found["fedprompt_ready", ()] == 1
    assert found["fedprompt_sites_connected", ()] == 4
    assert found["fedprompt_run_round", (run,)] == found["fedprompt_run_rounds", (run,)] == 3
    assert found["fedprompt_run_finished", (run,)] == 1
    assert found["fedprompt_run_absent_total", (("rule", "deadline"), run)] == 1
    assert found["fedprompt_site_absent_total", (run, ("site", "client_1"))] == 1
    assert found["fedprompt_site_absent_total", (run, ("site", "client_0"))] == 0
    assert found["fedprompt_run_bytes_total", (("direction", "up"), run)] == state.run.bytes_up > 0
    assert found["fedprompt_run_phase_seconds_total", (("phase", "train"), run)] > 0
    assert state.run.last_round_of == dict.fromkeys(["client_0", "client_1", "client_2", "client_3"], 3)


def test_no_label_holds_the_name_of_a_class_a_domain_a_file_or_a_patient(served: Any) -> None:
    folder, post, private = served
    state = Observed(folder).state(nodes(folder))
    figures = NodeFigures("client_0", lambda: [], lambda: (1.5, 20.0))
    site = post.sites["client_0"]
    site.told = figures.done
    for _, order in post.orders[:3]:
        site.answer(order)
    text = (exposition(of_server(state, ready=True)) + exposition(figures.families())).decode()
    assert len(private) > 6
    labels = re.findall(r'="([^"]*)"', text)
    assert labels
    for name in private:
        assert not [label for label in labels if name.casefold() in label.casefold()], name


def test_a_site_cannot_write_into_a_label() -> None:
    rule = 'x"} 1\nfedprompt_ready 7'
    run = RunState(
        "r", ("a",), incidents=(Incident(1, "a", "refused", rule, "text"), Incident(1, "a", "refused", "p" * 99, ""))
    )
    found = scraped(exposition(of_server(FederationState((), run, ()), ready=False)))
    assert found["fedprompt_run_refused_total", (("rule", "other"), ("run", "r"))] == 2
    assert found["fedprompt_ready", ()] == 0


def test_a_budget_and_a_certificate_are_counted_down() -> None:
    until = datetime.now(UTC) + timedelta(days=20, hours=1)
    run = RunState("r", epsilon=3.0, most_epsilon=8.0)
    state = FederationState((SiteState("a", "offline", ""),), run, (Term(f"{SERVER} (/secret/path)", until, ""),))
    text = exposition(of_server(state, ready=True))
    found = scraped(text)
    assert found["fedprompt_run_epsilon_spent", (("run", "r"),)] == 3
    assert found["fedprompt_run_epsilon_left", (("run", "r"),)] == 5
    assert found["fedprompt_certificate_days_left", (("certificate", "server"),)] == 20
    assert found["fedprompt_site_connected", (("site", "a"),)] == 0
    assert found["fedprompt_sites_absent", ()] == 1
    assert b"/secret" not in text


def test_a_node_counts_what_it_did(served: Any) -> None:
    _, post, _ = served
    figures, site = NodeFigures("client_0", lambda: [], lambda: (1.5, 20.0)), post.sites["client_0"]
    site.told = figures.done
    ours = [order for client, order in post.orders if client == 0 and Order.from_bytes(order).train == 3]
    site.answer(ours[0])
    site.answer(replace(Order.from_bytes(ours[0]), client=2).to_bytes())
    found = scraped(exposition(figures.families()))
    assert found["fedprompt_node_orders_total", (("kind", "work"),)] == 2
    assert found["fedprompt_node_refused_total", (("rule", "name"),)] == 1
    assert found["fedprompt_node_round", (("run", "watched-fedvpt-seed0"),)] == 3
    assert found["fedprompt_node_bytes_total", (("direction", "down"),)] > 2 * len(ours[0]) - 100
    assert found["fedprompt_node_order_seconds_total", (("phase", "work"),)] > 0
    assert (found["fedprompt_node_epsilon_spent", ()], found["fedprompt_node_epsilon_left", ()]) == (1.5, 18.5)
    assert found["fedprompt_ready", ()] == 0
    figures.heard(True)
    assert figures.ready


@pytest.fixture
def listener() -> Iterator[tuple[int, Any]]:
    from real_processes import free_port

    figures = SimpleNamespace(families=lambda: iter(()), ready=False)
    port = free_port()
    with listening(Address("127.0.0.1", port), figures):
        yield port, figures


def asked(port: int, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_ready_is_a_status(listener: tuple[int, Any]) -> None:
    port, figures = listener
    assert asked(port, "/ready") == (503, b'{"ready": false}\n')
    figures.ready = True
    assert asked(port, "/ready") == (200, b'{"ready": true}\n')
    assert asked(port, "/metrics")[0] == 200
    assert asked(port, "/")[0] == 404
    assert asked(port, "/metrics", method="POST")[0] == 501


def test_a_web_page_elsewhere_cannot_read_it(listener: tuple[int, Any]) -> None:
    assert asked(listener[0], "/metrics", host="evil.example.org")[0] == 403


def test_connections_that_drip_do_not_hide_the_server(listener: tuple[int, Any]) -> None:
    """Sixteen of them, a header every few seconds, and the probes of this machine got no answer: it was restarted."""
    port, figures = listener
    figures.ready = True
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(operator_listener.MOST)]
    try:
        for each in slow:
            each.sendall(b"GET /ready HTTP/1.1\r\n")
        for _ in range(3):
            assert asked(port, "/ready")[0] == 200
    finally:
        for each in slow:
            each.close()


def test_a_request_has_its_time_as_a_whole(listener: tuple[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_listener, "PATIENCE", 0.5)
    with socket.create_connection(("127.0.0.1", listener[0]), timeout=0.1) as slow:
        slow.sendall(b"GET /ready HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012  any of these may find out
            for _ in range(100):
                with contextlib.suppress(TimeoutError):
                    slow.sendall(b"X: y\r\n")
                    if slow.recv(1) == b"":
                        raise ConnectionError


def test_a_port_that_is_taken_is_told(listener: tuple[int, Any]) -> None:
    with pytest.raises(RunError, match="--metrics must be free"), listening(Address("127.0.0.1", listener[0]), None):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("text", ["0.0.0.0:9464", "192.0.2.1:9464", "example.org:9464", "[::]:9464", "x", "0", "99999"])
def test_other_machines_cannot_reach_it(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics must"):
        check_metrics_address(text)


def test_a_port_alone_means_this_machine() -> None:
    assert check_metrics_address("9464") == Address("127.0.0.1", 9464)
    assert check_metrics_address("localhost:9464") == Address("127.0.0.1", 9464)
    assert check_metrics_address("[::1]:9464") == Address("::1", 9464)
    assert check_metrics_address(None) is None


class Told:
    """Stands for a web hook."""

    def __init__(self) -> None:
        self.notices: list[tuple[str, str | None, str | None, int | None]] = []

    def tell(self, event: str, text: str, run: Any = None, site: Any = None, round: Any = None) -> None:
        self.notices.append((event, run, site, round))


def test_what_changes_is_told_once(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = served
    told, present = Told(), [True]
    whole = run_state(next(folder.runs.iterdir()))
    steps = [
        replace(whole, round=1, finished=False, incidents=()),
        replace(whole, round=2, finished=False, incidents=whole.incidents[:1]),
        replace(whole, incidents=(*whole.incidents, Incident(3, "client_2", "refused", "finite", "must be finite"))),
    ]
    observed: Any = SimpleNamespace(
        state=lambda found: FederationState(
            tuple(SiteState(each.name, each.status, each.since) for each in found), steps[0], ()
        )
    )
    watch = Watch(observed, lambda: nodes(folder, present[0]), told)  # type: ignore[arg-type]
    watch.look()
    assert told.notices == [], "the first look tells nothing about the past"
    watch.look()
    present[0] = False
    watch.look()
    run = whole.name
    assert told.notices == [("absent", run, f"client_{place}", None) for place in range(4)]
    del told.notices[:]
    steps.pop(0)
    watch.look()
    watch.look()
    assert told.notices == [("absent", run, "client_1", 2)]
    steps.pop(0)
    watch.look()
    watch.look()
    assert told.notices[1:] == [("refused", run, "client_2", 3), ("finished", run, None, None)]
    said = capsys.readouterr().err
    assert said.count("round 2 of 3 is committed") == 1
    assert f"run={run} site=client_1 round=2 absent (deadline): must answer within 5 s" in said


def test_an_expiring_certificate_is_told_once_a_day() -> None:
    told = Told()
    term = Term(f"{SERVER} (/secret)", datetime.now(UTC) + timedelta(days=20), "")
    observed: Any = SimpleNamespace(state=lambda found: FederationState((), None, (term,)))
    watch = Watch(observed, lambda: [], told)  # type: ignore[arg-type]
    for _ in range(3):
        watch.look()
    assert told.notices == [("certificate", None, None, None)]


def test_a_server_is_ready_while_it_answers_itself() -> None:
    fails = [False]

    def found() -> list[Any]:
        if fails[0]:
            raise RunError("no server")
        return []

    observed: Any = SimpleNamespace(state=lambda nodes: FederationState((), None, ()))
    watch = Watch(observed, found, Told())  # type: ignore[arg-type]
    figures = ServerFigures(watch)
    assert not figures.ready
    watch.look()
    assert not figures.ready, "sites cannot connect yet"
    watch.open = True
    assert figures.ready
    fails[0] = True
    watch._looked -= 60
    with pytest.raises(RunError):
        watch.look()
    assert not figures.ready
    assert json.dumps({"ready": figures.ready}) == '{"ready": false}'


def test_an_unreadable_run_file_is_told_and_ends_nothing(tmp_path: Path) -> None:
    folder = ServerFolder.create(tmp_path / "server", Address("127.0.0.1", 1), secure=False)
    (folder.runs / "bad").mkdir(parents=True)
    (folder.runs / "bad" / "run.db").write_bytes(b"no database")
    state = Observed(folder).state([])
    assert state.run is not None
    assert state.run.error
    assert b"fedprompt_run_round" not in exposition(of_server(state, ready=True))
