"""What several tests need to say about a run."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import math
import sqlite3
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprompt.client.local_training import TrainingResult
from fedprompt.client.runtime import ClientRuntime
from fedprompt.core import wire
from fedprompt.core.method import Method, Progress, Stage
from fedprompt.engines.in_process import InProcess
from fedprompt.experiment import Experiment
from fedprompt.federation.loop import Observer
from fedprompt.federation.stored_pool import StoredRows
from fedprompt.random_streams import SERVER, Stream, stream
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors


def seeded(seed: int = 0) -> Stream:
    """A stream of random numbers for whoever asks for one."""
    return stream(seed, 0, SERVER, "test")


def experiment(settings: Mapping[str, Any], method: Method | None = None) -> Experiment:
    """An experiment, optionally with a method that is not registered; one that reads class names gets the tiny dual encoder."""
    if method is not None and method.uses_text and settings["backbone"]["name"] == "tiny":
        settings = {**settings, "backbone": {**settings["backbone"], "name": "tiny-clip"}}
    made = Experiment(settings)
    if method is not None:
        made.factory.method = method
    return made


def run(
    settings: Mapping[str, Any], method: Method | None = None, observer: Observer | None = None, resume: bool = False
) -> Run:
    return experiment(settings, method).run(resume=resume, observer=observer)


def content(run: Run) -> str:
    """A digest of everything in a run file but clock times and the config's output section."""
    connection = sqlite3.connect(run.directory / "run.db")
    sha = hashlib.sha256()
    for query in (
        "SELECT key, value FROM facts WHERE key NOT IN ('config') ORDER BY key",
        "SELECT round, cohort, loss, bytes_down, bytes_up, summary FROM rounds ORDER BY round",
        "SELECT * FROM evaluations ORDER BY round, client",
        "SELECT * FROM client_states ORDER BY client",
        "SELECT * FROM server_state",
        "SELECT * FROM pool ORDER BY client",
        "SELECT * FROM pool_cells",
        "SELECT * FROM events ORDER BY rowid",
    ):
        for row in connection.execute(query):
            sha.update(repr(row).encode())
    connection.close()
    return sha.hexdigest()


def shared_tensors(run: Run) -> Tensors:
    state = run.reader.server_state()
    assert state is not None
    return wire.decode(state[1])


def server_tensors(run: Run) -> Tensors:
    state = run.reader.server_state()
    assert state is not None
    return wire.decode(state[2])


def assert_near(first: Tensors, second: Tensors) -> None:
    """The same tensors, to 1e-5."""
    assert set(first) == set(second)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def pool_tensors(run: Run) -> dict[int, Tensor]:
    """The rows of the pool by client."""
    rows = StoredRows(run.reader)
    return rows.chosen(rows.clients().tolist())


def local_tensors(run: Run, client: int) -> Tensors:
    blob = run.reader.client_state(client)
    assert blob is not None
    return wire.decode(blob)


@cache
def throwaway_cache() -> Path:
    """A cache for tests that are not about caching; it is gone when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="fedprompt-tests-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def fitting_stages(runtime: ClientRuntime, client: int) -> tuple[Stage, ...]:
    """What a client does with the parameters it predicts with before it is evaluated."""
    return runtime._newcoming if client in runtime.world.newcomers else runtime._adapting


def trained_alone(
    runtime: ClientRuntime,
    stages: Sequence[Stage],
    params: Tensors,
    round: int,
    client: int,
    purpose: str = "",
    fitting: bool = False,
) -> tuple[Tensors, Progress]:
    """What some stages make of one client's parameters."""
    result = runtime._train_locally(stages, {client: params}, round, purpose, fitting)[client]
    assert isinstance(result, TrainingResult), result
    return result.params, result.progress


def worst_difference(first: Tensors, second: Tensors) -> float:
    """Of all tensors; NaN where any of them has one, which is close to nothing."""
    assert set(first) == set(second)
    differences = [float((first[name] - second[name]).abs().max()) for name in first if first[name].numel()]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


class Stopped(Exception):
    """Raised by `StopAfter`."""


class StopAfter(Observer):
    """Ends a run after some round was committed."""

    def __init__(self, round: int) -> None:
        self._round = round

    def committed(self, record: Any) -> None:
        if record.round == self._round:
            raise Stopped


class Backwards(InProcess):
    """Clients in the opposite order: nothing may depend on it."""

    def _groups(self, clients: Sequence[int]) -> Iterator[list[int]]:
        return reversed(list(super()._groups(clients[::-1])))


def offer_method(folder: Path, *modules: str) -> None:
    """The metadata an installer would write for a package whose entry points are those modules; it counts for processes started there."""
    metadata = folder / "their_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    entries = [f"theirs{number or ''} = {module}\n" for number, module in enumerate(modules)]
    (metadata / "entry_points.txt").write_text("".join(["[fedprompt.methods]\n", *entries]))


def module_at(path: Path) -> Any:
    """A file of Python that is no part of a package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak_of(call: Callable[[], object], error: type[Exception]) -> int:
    """The most memory Python and numpy held while a call failed as it should."""
    tracemalloc.start()
    try:
        with pytest.raises(error):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
