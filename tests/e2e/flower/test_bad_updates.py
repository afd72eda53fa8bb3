"""Issue 7, "an update with NaN / wrong shape / forged weight / oversize rejected while the round goes on", over the real wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_processes import split, tiny
from support import local_tensors, module_at, shared_tensors, worst_difference

from fedprompt.experiment import Experiment

SITES = ("client_0", "client_1", "client_2")
LIAR = 2
PROGRAM = Path(__file__).with_name("tampering_node.py")
pytestmark = pytest.mark.timeout(900)


def test_bad_updates_are_refused_by_rule_and_everybody_else_goes_on(tmp_path: Path, found_federation: Any) -> None:
    program = module_at(PROGRAM)  # for what it lists
    last = program.FIRST + len(program.LIES) - 1
    settings = tiny("lies", partition={"scheme": "iid", "clients": len(SITES)}, federation={"rounds": last + 1})
    federation = found_federation(tmp_path, SITES)
    data = split(federation, settings)
    federation.serve()
    for site in SITES[:LIAR]:
        federation.node(site, data[site])
    name = SITES[LIAR]
    federation.python(f"liar-{name}", str(PROGRAM), str(federation.folder_of(name)), str(data[name]))
    run = federation.run(settings)
    refused = [
        (round, client, json.loads(detail)["rule"])
        for round, client, kind, detail in run.reader.events()
        if kind == "refused"
    ]
    assert refused == [(program.FIRST + place, LIAR, rule) for place, (_, rule) in enumerate(program.LIES)]
    away = {**settings["federation"], "away": {name: [program.FIRST, last]}}
    output = {"directory": str(tmp_path / "alone"), "cache": str(tmp_path / "cache"), "threads": 1}
    engine = {**settings["engine"], "cohort": 1}  # one client after the other, as nodes do it
    alone = Experiment({**settings, "federation": away, "engine": engine, "output": output}).run()
    assert worst_difference(shared_tensors(run), shared_tensors(alone)) <= 1e-5
    for client, site in enumerate(SITES):
        assert worst_difference(federation.own_tensors(site, run), local_tensors(alone, client)) <= 1e-5, site
