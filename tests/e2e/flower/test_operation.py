"""A federation as a hospital would run it: started by the lines of the systemd units, watched by Prometheus, with notices.

Prometheus is Debian's; without it that test is skipped. It uses the shipped rules as they are, so it takes minutes: Flower notices
a killed node after 74 s, and an alert waits another minute.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from real_processes import Federation, Process, free_port, split, tiny, until

SITES = ("client_0", "client_1", "client_2")
VICTIM = "client_1"
DEPLOY = Path(__file__).parents[3] / "deploy"
pytestmark = pytest.mark.timeout(1500)


def line_of(unit: str, **places: str) -> list[str]:
    """The arguments of fedprompt in a unit's ExecStart, with paths of this machine."""
    text = (DEPLOY / "systemd" / f"fedprompt-{unit}.service").read_text()
    program, *arguments = shlex.split(re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0])
    assert program == "/opt/fedprompt/bin/fedprompt"
    for place, here in places.items():
        key = {"server": "/var/lib/fedprompt-server/server", "site": "/var/lib/fedprompt-node/site"}.get(place, place)
        key = {"images": "${FEDPROMPT_IMAGES}", "port": "946"}.get(place, key)
        found = [each for each in arguments if each.startswith(key)]
        assert len(found) == 1, (place, arguments)
        arguments[arguments.index(found[0])] = here
    return arguments


class Hook(ThreadingHTTPServer):
    """A web hook that keeps the notices."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hooked)
        self.got: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Hooked(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


class Operated:
    """A server and its nodes, each with a port for its metrics."""

    def __init__(self, federation: Federation, data: dict[str, Path]) -> None:
        self.federation, self.data = federation, data
        self.ports = {name: free_port() for name in ("server", *SITES)}
        self.hook = Hook()
        notify = {"notify": f"http://127.0.0.1:{self.hook.server_address[1]}/hook"}
        (federation.folder_of_server / "notify.yaml").write_text(yaml.safe_dump(notify))
        port = str(self.ports["server"])
        self.server = federation.start("server", *line_of("server", server="fed/server", port=port))
        federation._servers.append(self.server)
        self.server.wait_for("ready at")
        self.nodes = {site: self.node(site) for site in SITES}

    def node(self, site: str) -> Process:
        places = {"site": f"fed/sites/{site}", "images": str(self.data[site]), "port": str(self.ports[site])}
        return self.federation.start(f"node-{site}", *line_of("node", **places))

    def ready(self, name: str) -> int:
        """The status of its /ready; 0 without an answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/ready", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_until_ready(self) -> None:
        for name in self.ports:
            until(lambda name=name: self.ready(name) == 200, f"{name} is ready")  # type: ignore[misc]

    def noticed(self, event: str, **about: Any) -> bool:
        return any(each["event"] == event and about.items() <= each.items() for each in self.hook.got)


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory, found_federation: Any) -> Iterator[Operated]:
    federation = found_federation(tmp_path_factory.mktemp("operated"), SITES)
    made = Operated(federation, split(federation, settings_of("split", 1)))
    yield made
    made.hook.shutdown()
    made.hook.server_close()


def settings_of(name: str, rounds: int, **changes: Any) -> dict[str, Any]:
    return tiny(
        name,
        partition={"scheme": "iid", "clients": len(SITES)},
        federation={"rounds": rounds, **changes.pop("federation", {})},
        **changes,
    )


def test_the_lines_of_the_units_start_a_federation_that_finishes_a_run(operated: Operated) -> None:
    operated.wait_until_ready()
    settings = settings_of("units", 3, output={"trackers": ["tensorboard"]})
    run = operated.federation.run(settings)
    assert list((run.directory / "trackers" / "tensorboard").glob("events.*")), "`federate run` has its trackers, too"
    assert list(run.clients) == list(SITES)
    assert [each for each in run.reader.events() if each[1] is not None] == [], "nobody was missing or refused"
    until(lambda: operated.noticed("finished", run=run.name), "the web hook heard of the end")
    for process in (operated.server, *operated.nodes.values()):
        said = [json.loads(line) for line in process.words.splitlines()]
        assert all(each.keys() == {"time", "level", "run", "site", "round", "text"} for each in said), process.name
        assert {"info"} <= {each["level"] for each in said}
    rounds = [each["round"] for each in map(json.loads, operated.server.words.splitlines()) if each["run"] == run.name]
    assert 3 in rounds
    trained = map(json.loads, operated.nodes[VICTIM].words.splitlines())
    assert {each["round"] for each in trained if each["run"] == run.name} >= {1, 2, 3}


class Prometheus:
    """Debian's Prometheus with the shipped rules, which scrapes every second."""

    def __init__(self, operated: Operated, folder: Path) -> None:
        self.port = free_port()
        shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", folder)
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            names = ["server"] if job["job_name"] == "fedprompt-server" else list(SITES)
            job["static_configs"] = [{"targets": [f"127.0.0.1:{operated.ports[name]}" for name in names]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder}/prometheus.yaml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def value(self, query: str) -> list[tuple[dict[str, str], float]]:
        found = self._ask(f"query?query={quote(query)}")["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def firing(self, alert: str) -> list[dict[str, str]]:
        alerts = self._ask("alerts")["alerts"]
        return [each["labels"] for each in alerts if each["labels"]["alertname"] == alert and each["state"] == "firing"]

    def _ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return {"result": [], "alerts": []}

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


@pytest.fixture
def prometheus(operated: Operated, tmp_path: Path) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed: apt-get install prometheus")
    operated.wait_until_ready()
    made = Prometheus(operated, tmp_path)
    yield made
    made.end()


def test_an_alert_fires_when_a_node_is_killed_and_ends_when_it_is_back(
    operated: Operated, prometheus: Prometheus
) -> None:
    until(lambda: len(prometheus.value("fedprompt_ready == 1")) == 1 + len(SITES), "all are scraped")
    ((labels, count),) = prometheus.value("fedprompt_sites_connected")
    assert (labels["job"], count) == ("fedprompt-server", len(SITES))
    assert prometheus.firing("FedpromptSiteAbsent") == []
    operated.nodes[VICTIM].kill()
    until(lambda: bool(prometheus.firing("FedpromptNodeDown")), "the site's own alert fires")
    until(lambda: bool(prometheus.firing("FedpromptSiteAbsent")), "the server's alert fires")
    ((labels),) = prometheus.firing("FedpromptSiteAbsent")
    assert labels["site"] == VICTIM
    assert operated.noticed("absent", site=VICTIM)
    operated.server.wait_for("absent: its node is no longer connected")
    operated.nodes[VICTIM] = operated.node(VICTIM)
    until(lambda: not prometheus.firing("FedpromptSiteAbsent"), "it is over when the node is back")
    assert operated.ready(VICTIM) == 200


def test_a_straggler_counts_in_a_later_round(operated: Operated) -> None:
    """It is stopped in the middle of its work, longer than a round lasts, and then goes on."""
    operated.wait_until_ready()
    settings = settings_of(
        "straggler",
        6,
        federation={"staleness": 0.5, "late_rounds": 5},
        train={"epochs": 10},
        engine={"deadline": 20.0, "patience": 90.0},
    )
    federation, node = operated.federation, operated.nodes[VICTIM]
    run = federation.submit(settings)
    federation.wait_for_round(settings, 1)
    until(lambda: node.working, f"{VICTIM} works")
    node.signal(signal.SIGSTOP)
    federation.wait_for_round(settings, 2)
    node.signal(signal.SIGCONT)
    assert run.end(600) == 0, run.tail
    found = federation.result(settings)
    own = [(round, kind, detail) for round, client, kind, detail in found.reader.events() if client == 1]
    late = [(round, detail) for round, kind, detail in own if kind == "late"]
    assert late, own
    assert late[0][1].endswith("of its weight")
    assert [each for each in found.reader.events() if each[1] not in (1, None)] == [], "nobody else was in the way"
    assert VICTIM in [list(found.clients)[client] for client in found.evaluations(6)]
    until(lambda: "late: " in operated.server.words, "the log of the server tells of it")
