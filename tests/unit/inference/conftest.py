"""One finished federation for all tests that only look at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from remote_run import exported, tiny_settings
from support import run, throwaway_cache

from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.runs.run import Run


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens a run uses a cache of his own, whatever the run says: here not the one of who runs the tests."""
    monkeypatch.setenv("FEDPROMPT_CACHE", str(throwaway_cache()))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """FedVPT with heads of the clients' own: two rounds, four clients, five classes."""
    return run(tiny_settings(tmp_path_factory.mktemp("using"), "finished"))


@pytest.fixture(scope="session")
def opened(finished: Run) -> LoadedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPROMPT_CACHE", str(throwaway_cache()))
        return LoadedRun.open(finished)


@pytest.fixture(scope="session")
def client(opened: LoadedRun) -> TrainedClient:
    return TrainedClient.open(opened, 0)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The images of every client as a parquet file, training images first, by the client's name."""
    folder = tmp_path_factory.mktemp("files")
    return exported(tiny_settings(folder, "files"), folder / "files")
