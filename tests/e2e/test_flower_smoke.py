"""The shortest federation of real processes: a server, two nodes with TLS and keys, one run, and how it stands."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from real_processes import Federation, split, tiny

SITES = ("client_0", "client_1")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: pip install 'fedprompt[flower]'"),
]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path, SITES)
    yield federation
    federation.end()


def test_two_sites_train_together(federation: Federation) -> None:
    settings = tiny("smoke", partition={"scheme": "iid", "clients": len(SITES)}, federation={"rounds": 2})
    server = federation.serve(ready=False)
    data = split(federation, settings)
    nodes = [federation.node(site, data[site]) for site in SITES]
    server.wait_for("ready at")
    run = federation.run(settings)
    assert list(run.clients) == list(SITES)
    assert [sorted(run.evaluations(round)) for round in (0, 1, 2)] == [[], [0, 1], [0, 1]]
    assert not run.reader.events()
    assert all(node.running for node in nodes)
    for site in SITES:
        assert federation.own_tensors(site, run)
