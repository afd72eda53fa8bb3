"""Issue 7, "optional extra": without `fedprompt[flower]` runs work as before, and commands that need it say what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fedprompt.errors import ConfigError

pytestmark = pytest.mark.e2e

MISSING = ("flwr", "ray", "cryptography", "httpx", "fastapi", "starlette", "uvicorn")  # what the extra alone brings
ASKED = {
    "a run": "run tiny.yaml --quiet",
    "help": "federate --help",
    "folders without keys": "federate init made --insecure --address 127.0.0.1:9 --site a",
    "a simulation": "run tiny.yaml name=simulated engine=flower-simulation",
    "folders with keys": "federate init fed --address 127.0.0.1:9 --site a",
    "a server": "server made/server --insecure",
    "a node": "node --site made/sites/a --data nowhere --insecure",
    "a federated run": "federate run tiny.yaml --server made/server",
    "how it stands": "federate status --server made/server",
}
WORKS = ("a run", "help", "folders without keys")
PROGRAM = """
import contextlib, io, json, sys

class Bare:
    def __init__(self, finder, missing):
        self.finder, self.missing = finder, missing
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.missing else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

missing, asked = json.loads(sys.argv[1])
sys.meta_path[:] = [Bare(finder, set(missing)) for finder in sys.meta_path]
from fedprompt.cli import main
found = {}
for what, arguments in asked.items():
    said, code = io.StringIO(), 0
    sys.argv = ["fedprompt", *arguments.split()]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    found[what] = [code, said.getvalue()]
assert not set(missing) & {name.partition(".")[0] for name in sys.modules}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the words of every command, in one process in which those packages cannot be found."""
    folder = tmp_path_factory.mktemp("bare")
    tiny = {
        "data": {"source": "tiny", "train_per_cell": 2, "test_per_cell": 1},
        "partition": {"scheme": "domains", "clients": 2},
        "backbone": {"name": "tiny"},
        "method": {"name": "head_tune"},
        "federation": {"rounds": 1},
        "output": {"threads": 1},
    }
    (folder / "tiny.yaml").write_text(json.dumps(tiny))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([MISSING, ASKED])],
        cwd=folder,
        env={**os.environ, "FEDPROMPT_CACHE": str(folder / "cache"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = {what: (code, words) for what, (code, words) in json.loads(done.stdout).items()}
    return found


@pytest.mark.parametrize("what", WORKS)
def test_what_needs_no_flower_works_without_it(said: dict[str, tuple[int, str]], what: str) -> None:
    assert said[what][0] == 0, said[what][1]


@pytest.mark.parametrize("what", [what for what in ASKED if what not in WORKS])
def test_what_needs_flower_says_what_to_install(said: dict[str, tuple[int, str]], what: str) -> None:
    code, words = said[what]
    assert code == ConfigError.exit_code, words
    assert words.startswith("error: ")
    assert "pip install 'fedprompt[flower]'" in words
    assert "Traceback" not in words
