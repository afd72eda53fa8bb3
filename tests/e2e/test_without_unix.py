"""A part of the tests in a Python that hides what Windows lacks; `make test-without-unix` runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.e2e

FILES = ["unit/data/test_row_file.py", "unit/deploy/test_lockfile.py", "unit/data/test_cache_key.py"]
LOOK = """
import os, sys
exec("try:\\n import fcntl\\nexcept ModuleNotFoundError: print('no fcntl')\\nimport os; print(hasattr(os, 'pread'))",
     {"__name__": "fedprompt.x", "__builtins__": __builtins__})
print(hasattr(os, 'pread'))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "tests/without_unix"), *sys.path])
    environment = {**os.environ, "WITHOUT_UNIX": "1", "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_package_sees_less_than_others_do() -> None:
    assert python("-c", LOOK).stdout.split() == ["no", "fcntl", "False", "True"]


def test_locks_and_row_files_work_without_unix() -> None:
    found = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}" for file in FILES))
    assert found.returncode == 0, found.stdout
    assert " passed" in found.stdout or "100%" in found.stdout
