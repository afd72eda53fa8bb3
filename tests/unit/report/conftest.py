"""Real tiny runs, made once, and runs written by hand where a test needs numbers or names no training would give."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedprompt import Experiment
from fedprompt.config import parse
from fedprompt.federation.loop import Observer
from fedprompt.metrics.accuracy import ClientResult, pack_hits, summarise
from fedprompt.runs.run import Run
from fedprompt.runs.store import RoundRecord, RunStore


class Interrupted(Exception):
    pass


class StopAfterOne(Observer):
    def committed(self, record: RoundRecord) -> None:
        raise Interrupted


def settings(directory: Path, method: str, seed: int, **train: float) -> dict[str, Any]:
    return {
        "name": "tiny",
        "seed": seed,
        "data": {"source": "tiny"},
        "partition": {"clients": 4},
        "backbone": {"name": "tiny"},
        "method": {"name": method},
        "train": {"lr": 0.05, **train},
        "federation": {"rounds": 2},
        "output": {"directory": str(directory), "cache": str(directory / "cache")},
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """fedvpt and head_tune, seeds 0 and 1."""
    directory = tmp_path_factory.mktemp("report")
    with one_thread():
        made = [
            Experiment(settings(directory, method, seed)).run() for method in ("fedvpt", "head_tune") for seed in (0, 1)
        ]
    yield made
    for run in made:
        run.close()


@pytest.fixture(scope="session")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """fedvpt with seed 2, stopped after the first of two rounds."""
    experiment = Experiment(settings(tmp_path_factory.mktemp("unfinished"), "fedvpt", 2))
    with one_thread(), pytest.raises(Interrupted):
        experiment.run(observer=StopAfterOne())
    run = Run(experiment.config.run_directory)
    yield run
    run.close()


Write = Callable[..., Run]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """A run file by hand: `write("name", [[9, 5], [8, 6]])` is two rounds, with correct answers of 10 by client.

    `tested` says which clients they are, when not the first ones, and `digest` what weights the run found. With `hits`, the
    run file says that the first images are the right ones.
    """
    made: list[Run] = []

    def make(
        directory: str,
        correct: list[list[int]],
        /,
        clients: list[str] | None = None,
        tested: list[int] | None = None,
        digest: str = "weights",
        hits: bool = False,
        **changes: Any,
    ) -> Run:
        config = parse({"federation": {"rounds": max(1, len(correct))}, **changes})
        facts = {
            "config": config.model_dump(mode="json"),
            "clients": clients or [f"client_{number}" for number in range(len(correct[0]) if correct else 1)],
            "backbone": digest,
            "versions": {"fedprompt": "0"},
        }
        store = RunStore.create(tmp_path / directory, facts)
        store.commit(RoundRecord(0, [], None, 1000, 1000, None), b"", b"", {}, {})
        for round, answers in enumerate(correct, start=1):
            results = [ClientResult(10, right, 1, 1, 0, [[10, 5, right]], {"ink": [10, right]}) for right in answers]
            if hits:
                results = [replace(each, hits=pack_hits(np.arange(10) < each.correct)) for each in results]
            cohort = list(range(len(answers)))
            record = RoundRecord(round, cohort, 0.5, 80, 40, summarise(results), {"train": 1.5, "evaluate": 0.5})
            numbers = tested or range(len(results))
            evaluations = {number: result.to_json() for number, result in zip(numbers, results, strict=True)}
            store.commit(record, b"", b"", {}, evaluations)
        store.close()
        made.append(Run(tmp_path / directory))
        return made[-1]

    yield make
    for run in made:
        run.close()
