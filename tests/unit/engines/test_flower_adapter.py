"""Issue 7, "one adapter module, no method-specific code in it" and "telemetry off"."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedprompt
from fedprompt.core import registry

pytestmark = pytest.mark.unit

PACKAGE = Path(fedprompt.__file__).parent
ADAPTER = PACKAGE / "engines" / "flower"
APP = PACKAGE / "deploy" / "server_app.py"  # what the SuperLink starts
FAR_SIDE = [
    *sorted(ADAPTER.glob("*.py")),
    *sorted((PACKAGE / "engines" / "remote").glob("*.py")),
    APP,
]
FLOWERS = {"flwr", "ray"}


def imported(path: Path) -> Iterator[str]:
    """The packages a module asks for, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def test_nothing_but_the_adapter_imports_flower() -> None:
    users = {path for path in PACKAGE.rglob("*.py") if FLOWERS & set(imported(path))}
    assert users, "the search finds what is there"
    assert {path.parent for path in users - {APP}} == {ADAPTER}


def test_no_method_is_named_on_the_way_to_a_client() -> None:
    names = {*registry.methods(), *registry.variants()}
    assert len(names) > 10
    for path in FAR_SIDE:
        words = set(re.findall(r"[a-z0-9_]+", path.read_text(encoding="utf-8").lower()))
        assert not words & (names - {"local"}), path.name  # `local` is a word of the field, too


def test_flower_and_ray_keep_quiet_whatever_the_environment_says() -> None:
    """Flower reads its switch once, when it is imported: what counts is what it has read."""
    pytest.importorskip("flwr")
    loud = {"FLWR_TELEMETRY_ENABLED": "1", "FLWR_DISABLE_UPDATE_CHECK": "0", "RAY_USAGE_STATS_ENABLED": "1"}
    code = (
        "import os, fedprompt.engines.flower.transport\n"
        "from flwr.supercore import telemetry\n"
        "assert telemetry.FLWR_TELEMETRY_ENABLED == '0'\n"
        "assert os.environ['FLWR_DISABLE_UPDATE_CHECK'] == '1'\n"
        "assert os.environ['RAY_USAGE_STATS_ENABLED'] == '0'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **loud}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_simulation_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from fedprompt.config import EngineConfig
    from fedprompt.engines.flower import simulation
    from fedprompt.errors import RunError

    def failing(*arguments: object, **settings: object) -> None:
        try:
            raise RuntimeError("Simulation Runtime crashed.") from OSError("no room in /dev/shm")
        except RuntimeError as error:
            raise RuntimeError("An error was encountered. Ending simulation.") from error

    monkeypatch.setattr(simulation, "run_simulation", failing)
    with pytest.raises(RunError, match="Flower's simulation did not run: no room in /dev/shm"):
        simulation.simulate(2, EngineConfig(), lambda post: None)


def test_an_error_of_ours_is_one_line_of_the_log_and_any_other_is_all_of_it() -> None:
    pytest.importorskip("flwr")
    from fedprompt.deploy.server_app import Plainly, RunFailed

    def logged(error: Exception) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(logging.Formatter().format(record))  # type: ignore[method-assign]
        log = logging.Logger("of a run")
        log.addHandler(handler)
        log.addFilter(Plainly())
        log.error("%s raised an exception", "ServerApp", exc_info=error)
        log.error("Exit Code: 201\n\nmore about it")
        return lines

    assert logged(RunFailed("RunError: run 'x' exists already")) == ["RunError: run 'x' exists already"]
    unknown = logged(KeyError("x"))
    assert unknown[0].splitlines() == ["ServerApp raised an exception", "KeyError: 'x'"]
    assert unknown[1].startswith("Exit Code: 201")
