"""Rooms that read and print: a command that only looks at configs or runs must not wait for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

ROOMS = ("report", "runs", "dashboard", "papers", "config")
CODE = """
import importlib, pkgutil, sys
for room in sys.argv[1:]:
    package = importlib.import_module(f"fedprompt.{room}")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    assert names, room
    for name in names:
        importlib.import_module(name)
        if "torch" in sys.modules:
            sys.exit(f"{name} imports torch")
"""


def test_no_module_that_only_reads_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *ROOMS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
