"""Runs whose clients are reached by post, without a network: every message is bytes, and all of them can be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import local_tensors, pool_tensors, server_tensors, shared_tensors, throwaway_cache, worst_difference

from fedprompt.core import wire
from fedprompt.core.messages import Failure
from fedprompt.data.partition.export_clients import export_clients
from fedprompt.engines.remote.node import Node, SimulatedNode, Site
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.experiment import Experiment
from fedprompt.federation.loop import Observer
from fedprompt.metrics.accuracy import STAYING
from fedprompt.runs.run import Run
from fedprompt.runs.store import RUN_ID
from fedprompt.tensors import Tensors


def tiny_settings(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Four clients of the tiny set with few images, for runs that take half a second; whole sections are replaced."""
    values: dict[str, Any] = {
        "name": name,
        "data": {"source": "tiny", "train_per_cell": 2, "test_per_cell": 1},
        "partition": {"scheme": "domains", "clients": 4},
        "backbone": {"name": "tiny"},
        "method": {"name": "fedvpt", "prompt_tokens": 2},
        "train": {"lr": 0.05, "batch_size": 8, "momentum": 0.0},
        "federation": {"rounds": 2},
        "output": {"directory": str(folder), "cache": str(throwaway_cache()), "threads": 1},
    }
    return {**values, **changes}


class Recorder:
    """Carries orders to one node that plays all clients, and keeps a copy of every message."""

    def __init__(self, node: Node | None = None) -> None:
        self._node = node or SimulatedNode()
        self.orders: list[tuple[int, bytes]] = []
        self.answers: list[tuple[int, bytes]] = []

    def deliver(self, orders: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | Failure]]:
        waiting = list(orders)
        self.orders += waiting
        for client, order in reversed(waiting):  # an order of arrival that nobody may rely on
            answer = self._node.answer(order)
            self.answers.append((client, answer))
            yield client, answer


def run_remotely(settings: Mapping[str, Any], post: Any = None, observer: Observer | None = None) -> Run:
    """A whole run; one that is there already is resumed."""
    experiment = Experiment({**settings, "engine": {**settings.get("engine", {}), "kind": "flower-simulation"}})
    experiment.run_remotely(experiment.factory.prepare(), observer or Observer(), post or Recorder())
    return Run(experiment.config.run_directory)


class SiteRecorder(Recorder):
    """Carries orders to sites by their names; one that is not there is absent."""

    def __init__(self, sites: Mapping[str, Node]) -> None:
        super().__init__()
        self.sites = dict(sites)
        self.names: tuple[str, ...] = ()
        self.meetings: dict[str, bytes] = {}

    def meet(self, order: bytes, names: Sequence[str]) -> Mapping[str, bytes | Failure]:
        chosen = list(names or sorted(self.sites))
        self.orders += [(place, order) for place in range(len(chosen))]
        found = {name: self._asked(place, name, order) for place, name in enumerate(chosen)}
        self.meetings = {name: came for name, came in found.items() if isinstance(came, bytes)}
        return found

    def number(self, names: Sequence[str], introduction: bytes = b"") -> None:
        self.names = tuple(names)

    def deliver(self, orders: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | Failure]]:
        waiting = list(orders)
        self.orders += waiting
        for client, order in reversed(waiting):
            yield client, self._asked(client, self.names[client], order)

    def _asked(self, client: int, name: str, order: bytes) -> bytes | Failure:
        if name not in self.sites:
            return Failure(client, "absent", "must be connected")
        answer = self.sites[name].answer(order)
        self.answers.append((client, answer))
        return answer


def exported(settings: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """The images of every client of a partition as a file of its own, by the client's name."""
    source, manifest, _, _ = Experiment(settings).factory.prepare()
    return dict(zip(manifest.clients.names, export_clients(source, manifest, folder), strict=True))


OPEN = SitePolicy(evaluate="all", least_count=1)  # of sites that are compared with clients of one machine


def sites_with(files: Mapping[str, Path], folder: Path, **options: Any) -> dict[str, Site]:
    """A site for every file, with a folder of its own and a policy that keeps no figures back."""
    options = {"policy": OPEN, **options}
    return {name: Site(name, str(file), folder / name, **options) for name, file in files.items()}


def node_folder(run: Run) -> Path:
    """Where the simulated nodes of a run keep what is their clients' own."""
    return run.directory / "nodes" / str(run.reader.fact(RUN_ID))


def kept_tensors(run: Run, client: int, folder: Path | None = None) -> Tensors | None:
    """What a client keeps on its node as of the last commit; None for one that never took part."""
    blob = run.reader.client_state(client)
    if blob is None:
        return None
    (number,) = wire.decode(blob).values()
    return wire.decode(((folder or node_folder(run)) / str(client) / f"{int(number)}.safetensors").read_bytes())


def assert_same_as_in_process(post: Run, here: Run, folders: Mapping[int, Path] | None = None) -> None:
    """All tensors to 1e-5, those that clients keep included, and all figures of all rounds.

    `folders` tells where each client keeps its own; by default they are all simulated by one node.
    """
    for tensors in (shared_tensors, server_tensors):
        assert worst_difference(tensors(post), tensors(here)) <= 1e-5
    rows, expected = ({str(client): row for client, row in pool_tensors(run).items()} for run in (post, here))
    assert worst_difference(rows, expected) <= 1e-5
    for client in range(len(here.clients)):
        kept = kept_tensors(post, client, (folders or {}).get(client))
        assert (kept is None) == (here.reader.client_state(client) is None)
        assert kept is None or worst_difference(kept, local_tensors(here, client)) <= 1e-5
    assert_same_figures(post, here)


def assert_same_figures(first: Run, second: Run, within: float = 1e-5) -> None:
    """Cohorts, losses, bytes and evaluations of every round."""
    for one, other in zip(first.rounds(), second.rounds(), strict=True):
        assert (one.cohort, one.bytes_up, one.bytes_down) == (other.cohort, other.bytes_up, other.bytes_down)
        assert one.loss == (None if other.loss is None else pytest.approx(other.loss, rel=within, abs=within))
        results, others = (each.reader.evaluations(one.round) for each in (first, second))
        assert results.keys() == others.keys()
        for client, result in results.items():
            for name, value in others[client].items():
                if name not in ("bins", "domains", *STAYING):  # a site sends none of them
                    assert result[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
            assert result["domains"] == others[client]["domains"]
