"""What contributors are told is what the project does: targets, hooks, the version, links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import documents
import pytest
import yaml

import fedprompt

pytestmark = pytest.mark.unit

ROOT = documents.ROOT
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"))
HABITS = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / ".github/PULL_REQUEST_TEMPLATE.md",
    *TEMPLATES,
]
MAKEFILE = (ROOT / "Makefile").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def targets() -> dict[str, list[str]]:
    """The targets of the Makefile with the commands of their recipes."""
    found = re.findall(r"^([a-z-]+):[^=\n]*\n((?:(?:\t|#).*\n)*)", MAKEFILE, re.MULTILINE)
    return {name: [line[1:] for line in recipe.splitlines() if line.startswith("\t")] for name, recipe in found}


def test_contributing_says_when_every_check_is_run() -> None:
    told = re.findall(r"^\| `make ([a-z-]+)` \|.*\| (.+) \|$", CONTRIBUTING, re.MULTILINE)
    checks = {name for name in targets() if name.startswith("test")} | {"lint", "docs", "bench"}
    assert {name for name, _ in told} == checks
    assert all(len(when) > 10 for _, when in told)


@pytest.mark.parametrize("path", [*HABITS, ROOT / "README.md", ROOT / ".ci/run"], ids=documents.name)
def test_every_target_that_is_named_exists(path: Path) -> None:
    known = set(targets())
    assert {"test", "test-slow", "setup", "clean"} <= known
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE)) <= known


def test_every_test_is_run_by_some_target() -> None:
    """The three selections are all there is, and `test-all` makes all of them."""
    marks = [
        found
        for recipe in targets().values()
        for found in re.findall(r"pytest.*-m (.+)|\(PYTEST\) -m (.+)", "\n".join(recipe))
    ]
    assert {(one or other).strip('"') for one, other in marks} == {
        "not slow and not e2e_flower",
        "slow and not e2e_flower",
        "e2e_flower",
    }
    assert re.search(r"^test-all: test test-slow test-flower\b", MAKEFILE, re.MULTILINE)


def test_hooks_before_a_commit_are_the_checks_of_make_lint() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [each["repo"] for each in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [line.replace("$(BIN)", ".venv/bin") for line in targets()["lint"]]
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in hooks)


def test_the_version_is_said_in_one_place() -> None:
    pyprojecttoml = pytest.importorskip("setuptools.config.pyprojecttoml")
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in written
    assert pyprojecttoml.read_configuration(ROOT / "pyproject.toml")["project"]["version"] == fedprompt.__version__
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"\n## {fedprompt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_authors_and_licence_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["authors"] == project["authors"] == [{"name": "The fedprompt authors"}]
    assert cited["license"] == project["license"]
    assert "urls" not in project


@pytest.mark.parametrize("path", HABITS, ids=documents.name)
def test_links_lead_somewhere_and_no_address_is_invented(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#:\s]+?)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target
    assert not re.search(r"\w@\w|https?://", text)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_has_a_name_and_says_what_it_is_for(path: Path) -> None:
    front = yaml.safe_load(path.read_text().split("---\n")[1])
    assert {"name", "about", "labels"} == set(front)


def test_files_that_contributing_names_exist() -> None:
    named = re.findall(r"(?<![\w/])((?:tests|docs|src|benchmarks)/[\w./]*\w)", CONTRIBUTING)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists() and "NAME" not in name] == []
