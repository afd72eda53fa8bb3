"""Issue 7, "same seed, same config: same final tensors as in process": over TLS with keys, and simulated with Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_processes import Federation, split, tiny
from support import local_tensors, pool_tensors, server_tensors, shared_tensors, worst_difference

from fedprompt.core import wire
from fedprompt.experiment import Experiment
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

METHODS = {
    "pfedbayespt": "tiny",  # a posterior of each client's own, and draws
    "pep_fedpt": "tiny",  # statistics before the first round, prompts by class
    "pfedpg": "tiny",  # a generator on the server: everybody receives something else
    "pfedmoap": "tiny-clip",  # a pool on the server, experts go down
    "pfeddc": "tiny-clip",  # two prompts, one of them never sent
}
SITES = ("client_0", "client_1", "client_2", "client_3")
CLOSE = 1e-5
pytestmark = pytest.mark.timeout(900)

Own = Callable[[int], Tensors]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, found_federation: Any) -> Federation:
    """One server and one set of nodes, for all runs of this file."""
    federation = found_federation(tmp_path_factory.mktemp("equal"), SITES)
    data = split(federation, tiny("split"))
    federation.serve()
    for site in SITES:
        federation.node(site, data[site])
    return federation


@pytest.mark.parametrize("method", METHODS)
def test_sites_over_tls_end_where_one_process_does(federation: Federation, method: str) -> None:
    """Three of four sites in a round, and an evaluation of all every second round."""
    schedule = {"fraction": 0.75, "evaluate_every": 2, "evaluate_last": 0}
    settings = tiny(method, method, backbone={"name": METHODS[method]}, federation=schedule)
    run = federation.run(settings)
    alone = _alone(settings, federation.folder)
    assert len({tuple(record.cohort) for record in alone.rounds()[1:]}) > 1, "not always the same sites"
    assert list(run.clients) == list(alone.clients) == list(SITES)
    _assert_same(run, alone, lambda client: federation.own_tensors(SITES[client], run))


@pytest.mark.parametrize("method", METHODS)
def test_a_simulation_ends_where_one_process_does(tmp_path: Path, method: str) -> None:
    settings = tiny(method, method, backbone={"name": METHODS[method]}, federation={"rounds": 2})
    alone = _alone(settings, tmp_path)
    output = {"directory": str(tmp_path / "simulated"), "cache": str(tmp_path / "cache")}
    engine = {"kind": "flower-simulation", "workers": 2, "deadline": 600.0}  # in which Ray has to start, too
    run = Experiment({**settings, "engine": engine, "output": output}).run()

    def own(client: int) -> Tensors:
        blob = run.reader.client_state(client)
        assert blob is not None
        kept_as = int(wire.decode(blob)["kept_as"])
        kept = run.directory / "nodes" / run.reader.fact("run_id") / str(client) / f"{kept_as}.safetensors"
        return wire.decode(kept.read_bytes())

    _assert_same(run, alone, own)


def _alone(settings: dict[str, Any], folder: Path) -> Run:
    output = {"directory": str(folder / "alone"), "cache": str(folder / "cache"), "threads": 1}
    return Experiment({**settings, "output": output}).run()


def _assert_same(run: Run, alone: Run, own: Own) -> None:
    assert worst_difference(shared_tensors(run), shared_tensors(alone)) <= CLOSE
    assert worst_difference(server_tensors(run), server_tensors(alone)) <= CLOSE
    rows, rows_alone = ({str(key): row for key, row in pool_tensors(each).items()} for each in (run, alone))
    assert worst_difference(rows, rows_alone) <= CLOSE
    for client in range(len(alone.clients)):
        assert worst_difference(own(client), local_tensors(alone, client)) <= CLOSE
    for record, same in zip(run.rounds(), alone.rounds(), strict=True):
        assert (record.round, record.cohort) == (same.round, same.cohort)
        assert (record.bytes_down, record.bytes_up) == (same.bytes_down, same.bytes_up)
        assert record.loss == pytest.approx(same.loss, abs=1e-4)
        _assert_same_evaluations(run.evaluations(record.round), alone.evaluations(record.round))
    assert not [event for event in run.reader.events() if event[2] in ("refused", "untested")]


def _assert_same_evaluations(found: dict[int, dict[str, Any]], same: dict[int, dict[str, Any]]) -> None:
    assert found.keys() == same.keys()
    for client, result in found.items():
        assert (result["samples"], result["correct"]) == (same[client]["samples"], same[client]["correct"])
        assert result["domains"] == same[client]["domains"]
        for figure in ("nll", "entropy", "mutual_information"):
            assert result[figure] == pytest.approx(same[client][figure], abs=1e-4), figure
