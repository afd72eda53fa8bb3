"""One finished federation for all tests that only look at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_post import exported, tiny_settings
from support import run

from fedprompt.run import Run
from fedprompt.using.client import TrainedClient
from fedprompt.using.opened import OpenedRun


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """FedVPT with heads of the clients' own: two rounds, four clients, five classes."""
    return run(tiny_settings(tmp_path_factory.mktemp("using"), "finished"))


@pytest.fixture(scope="session")
def opened(finished: Run) -> OpenedRun:
    return OpenedRun.open(finished)


@pytest.fixture(scope="session")
def client(opened: OpenedRun) -> TrainedClient:
    return TrainedClient.open(opened, 0)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The images of every client as a parquet file, training images first, by the client's name."""
    folder = tmp_path_factory.mktemp("files")
    return exported(tiny_settings(folder, "files"), folder / "files")
