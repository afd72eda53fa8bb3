"""The methods that docs/adding_a_method.md shows: files as printed, offered by a package, through all that ours go through."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import documents
import pytest
import yaml
from support import offer_method

pytestmark = pytest.mark.unit

PAGE = documents.ROOT / "docs/adding_a_method.md"
CODE = {
    re.findall(r'@register\("(.*?)"\)', code)[0]: code
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
}
EXAMPLES = {"prompted_scale": ("tokens", "tiny"), "context_ensemble": ("contexts", "tiny-clip")}
LEAST = 6  # cases of each example in either part of the matrix


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the files of the page, which a process that finds it on its path takes for an installed package."""
    for name, code in CODE.items():
        (tmp_path / f"{name}.py").write_text(code)
    offer_method(tmp_path, *CODE)
    return tmp_path


def python(package: Path, *words: str, cwd: Path = documents.ROOT) -> subprocess.CompletedProcess[str]:
    found = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=cwd, env={**environment, "PYTHONPATH": found}, capture_output=True, text=True, check=False
    )


def test_every_example_of_the_page_is_tested_here() -> None:
    assert list(CODE) == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_line_runs_it(name: str, package: Path, settings: Any) -> None:
    setting, backbone = EXAMPLES[name]
    made = settings(method={"name": name, setting: 3}, backbone={"name": backbone})
    (package / "config.yaml").write_text(yaml.safe_dump(made))
    done = python(package, "fedprompt.cli", "run", "config.yaml", "--json", cwd=package)
    assert done.returncode == 0, done.stderr
    assert f'"label": "{name}"' in done.stdout


@pytest.mark.parametrize("part", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_it_goes_through_the_matrix(part: str, package: Path) -> None:
    """All that a method of ours goes through; the long cases of it where those of ours are run."""
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", part, "-k", " or ".join(EXAMPLES), "-rA"]
    done = python(package, "pytest", "tests/matrix", *options)
    assert done.returncode == 0, done.stdout
    passed = Counter(re.findall(r"^PASSED tests/matrix/\w+\.py::\w+\[(\w+)\]", done.stdout, re.MULTILINE))
    assert set(passed) == set(EXAMPLES)
    assert min(passed.values()) >= LEAST, passed
    for name in re.findall(r"^PASSED .*_gives_fedprompts_own_logits\[(\w+)\]", done.stdout, re.MULTILINE):
        assert f"docs/export.md says nothing about `{name}`; its export is exact: add it" in done.stdout


@pytest.mark.parametrize("words", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_it_is_written_as_the_code_of_this_package_must_be(words: list[str], package: Path) -> None:
    config = ["--config-file" if words[0] == "mypy" else "--config", "pyproject.toml"]
    done = python(package, *words, *config, *(str(package / f"{name}.py") for name in EXAMPLES))
    assert done.returncode == 0, done.stdout + done.stderr
