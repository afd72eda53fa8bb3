"""Fixtures every test may use. A whole federated run on the tiny set and the tiny backbone takes about a second."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from case_sampling import is_left_for_later

# machines are noisy and a red test must be red again: no deadlines, and the same examples every time
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")

# a shell lets what it starts in the background ignore interrupts, and so would the programs that tests start and interrupt
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("sampled") and is_left_for_later(item.originalname, item.callspec.id):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A tiny experiment as a plain mapping; keyword arguments replace whole values or update sections.

    Its cache is also that of whoever opens the run: a run file does not decide on it.
    """
    monkeypatch.setenv("FEDPROMPT_CACHE", str(tmp_path / "cache"))

    def make(**changes: Any) -> dict[str, Any]:
        values: dict[str, Any] = {
            "name": "tiny",
            "seed": 0,
            "data": {"source": "tiny", "train_per_cell": 4, "test_per_cell": 2},
            "partition": {"scheme": "domains", "clients": 4},
            "backbone": {"name": "tiny"},
            "method": {"name": "fedvpt", "prompt_tokens": 2},
            "train": {"lr": 0.05, "batch_size": 8, "momentum": 0.9},
            "federation": {"rounds": 2},
            "output": {"directory": str(tmp_path / "runs"), "cache": str(tmp_path / "cache"), "threads": 1},
        }
        for key, value in changes.items():
            whole = key in ("method", "variant", "sweep") or not isinstance(value, dict)
            values[key] = value if whole else {**values.get(key, {}), **value}
        return values

    return make
