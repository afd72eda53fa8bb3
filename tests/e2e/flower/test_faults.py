"""Issue 7, "faults, tested on loopback with real processes": nodes and servers that die, hang, or are told to stop.

What a federation that lost a site for some rounds ends with is held against a run in one process in which that client was
away in the same rounds: so the site came back with its own state, and nothing else was disturbed.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_processes import Federation, Process, split, tiny, until
from support import local_tensors, server_tensors, shared_tensors, worst_difference

from fedprompt.errors import RunError
from fedprompt.experiment import Experiment
from fedprompt.runs.run import Run

SITES = ("client_0", "client_1", "client_2")
VICTIM = "client_1"
DEADLINE = 30.0  # where somebody will miss it; on a busy machine others must not
CLOSE = 1e-5
pytestmark = pytest.mark.timeout(900)


@dataclass
class Standing:
    """A server and its nodes, some of which a test replaces."""

    federation: Federation
    data: dict[str, Path]
    server: Process
    nodes: dict[str, Process]

    def again(self, site: str) -> None:
        self.nodes[site] = self.federation.node(site, self.data[site])

    def wait_for_middle(self, settings: dict[str, Any], round: int, site: str) -> Process:
        """Until a site works on an order after that round was committed."""
        self.federation.wait_for_round(settings, round)
        until(lambda: self.nodes[site].working, f"{site} works")
        return self.nodes[site]


def longer(name: str, rounds: int, deadline: float = 120.0) -> dict[str, Any]:
    """A run whose orders take seconds, so that there is a middle."""
    return tiny(
        name,
        partition={"scheme": "iid", "clients": len(SITES)},
        train={"epochs": 10},
        federation={"rounds": rounds},
        engine={"deadline": deadline},
    )


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, found_federation: Any) -> Standing:
    federation = found_federation(tmp_path_factory.mktemp("faults"), SITES)
    data = split(federation, longer("split", 1))
    server = federation.serve()
    return Standing(federation, data, server, {site: federation.node(site, data[site]) for site in SITES})


@pytest.fixture
def federation(standing: Standing) -> Federation:
    return standing.federation


def test_a_killed_node_is_missed_until_it_comes_back_with_its_own_state(
    standing: Standing, federation: Federation
) -> None:
    settings = longer("killed-node", 8, DEADLINE)
    run = federation.submit(settings)
    standing.wait_for_middle(settings, 1, VICTIM).kill()
    kept = federation.own_file(VICTIM, federation.result(settings))
    assert kept.is_file(), "what it kept when it last took part outlives it"
    federation.wait_for_round(settings, 2)  # closed by the deadline
    standing.again(VICTIM)
    assert run.end(600) == 0, run.tail
    _assert_missed_some_rounds(federation, settings)
    assert not kept.exists(), "its state number has gone on"


def test_a_node_that_hangs_is_missed_until_it_goes_on(standing: Standing, federation: Federation) -> None:
    settings = longer("hanging-node", 7, DEADLINE)
    run = federation.submit(settings)
    node = standing.wait_for_middle(settings, 1, VICTIM)
    node.signal(signal.SIGSTOP)
    federation.wait_for_round(settings, 2)
    node.signal(signal.SIGCONT)
    assert run.end(600) == 0, run.tail
    _assert_missed_some_rounds(federation, settings)


def _assert_missed_some_rounds(federation: Federation, settings: dict[str, Any]) -> None:
    """It was refused and untested by name, took part at the end, and all is as in one process without it in between."""
    run, rounds, victim = federation.result(settings), settings["federation"]["rounds"], SITES.index(VICTIM)
    events = [(round, kind, detail) for round, client, kind, detail in run.reader.events() if client == victim]
    assert [each for each in run.reader.events() if each[1] not in (victim, None)] == [], "nobody else was in the way"
    missed = [round for round, kind, _ in events if kind == "refused"]
    untested = [round for round, kind, _ in events if kind == "untested"]
    assert (untested[0], missed[0]) == (2, 3), events  # the order under way was to test round 2 and to train in 3
    assert events[0][2].startswith("deadline: must answer within"), events
    assert missed == list(range(3, missed[-1] + 1)), events
    assert missed[-1] < rounds, events
    assert [victim in run.evaluations(round) for round in range(1, rounds + 1)] == [
        round not in untested for round in range(1, rounds + 1)
    ]
    away = {"federation": {**settings["federation"], "away": {VICTIM: [missed[0], missed[-1]]}}}
    alone = _alone({**settings, **away}, federation.folder)
    assert worst_difference(shared_tensors(run), shared_tensors(alone)) <= CLOSE
    for client, site in enumerate(SITES):
        assert worst_difference(federation.own_tensors(site, run), local_tensors(alone, client)) <= CLOSE, site
    nll = [each.evaluations(rounds)[victim]["nll"] for each in (run, alone)]
    assert nll[0] == pytest.approx(nll[1], abs=1e-4)


@pytest.mark.parametrize("whole", [True, False], ids=["all-of-it", "its-first-process"])
def test_a_killed_server_resumes_to_the_same_result(standing: Standing, federation: Federation, whole: bool) -> None:
    undisturbed, settings = longer("undisturbed", 4), longer(f"killed-server-{whole}", 4)
    if federation.rounds(undisturbed) < 0:
        federation.run(undisturbed)
    run = federation.submit(settings)
    standing.wait_for_middle(settings, 1, VICTIM)
    if whole:
        federation.kill_server()
        until(lambda: not federation.processes_of_server(), "nothing is left of the server", 10)
    else:
        standing.server.signal(signal.SIGKILL)  # what it had started finds out by itself
    assert run.end() == RunError.exit_code
    assert "no server at" in run.words
    before = federation.rounds(settings)
    assert 1 <= before < 4
    standing.server = federation.serve()
    resumed = federation.run(settings, "--resume")
    assert all(node.running for node in standing.nodes.values()), "nodes find the server again by themselves"
    _assert_identical(federation, resumed, federation.result(undisturbed))


def test_stopping_the_command_stops_the_run_which_can_be_resumed(standing: Standing, federation: Federation) -> None:
    settings = longer("interrupted", 4)
    run = federation.submit(settings)
    standing.wait_for_middle(settings, 1, VICTIM)
    run.signal(signal.SIGINT)
    assert run.end(30) == 130, run.tail
    assert "Continue with --resume" in run.words
    assert "Traceback" not in run.words
    before = federation.rounds(settings)
    assert federation.status()["started"][0]["status"] == "finished:stopped"
    assert federation.rounds(settings) == before < 4, "nobody goes on with it"
    resumed = federation.run(settings, "--resume")
    undisturbed = longer("undisturbed", 4)
    if federation.rounds(undisturbed) < 0:
        federation.run(undisturbed)
    _assert_identical(federation, resumed, federation.result(undisturbed))


def _assert_identical(federation: Federation, run: Run, other: Run) -> None:
    """To the last bit: tensors of the server and of the sites, and figures."""
    assert [record.round for record in run.rounds()] == [record.round for record in other.rounds()]
    for tensors in (shared_tensors, server_tensors):
        assert worst_difference(tensors(run), tensors(other)) == 0
    for site in SITES:
        assert worst_difference(federation.own_tensors(site, run), federation.own_tensors(site, other)) == 0, site
    for record in run.rounds():
        assert run.evaluations(record.round) == other.evaluations(record.round)


def _alone(settings: dict[str, Any], folder: Path) -> Run:
    """In one process, one client after the other as nodes do it: the rounding of folded clients grows over many steps."""
    engine = {**settings["engine"], "cohort": 1}
    output = {"directory": str(folder / "alone"), "cache": str(folder / "cache"), "threads": 1}
    return Experiment({**settings, "engine": engine, "output": output}).run()
