"""`make docs` ends with an error where a page has a broken link. The recipe of the Makefile itself is run, on a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import documents
import pytest

pytestmark = pytest.mark.unit
pytest.importorskip("material", reason="needs mkdocs-material (pip install '.[docs]')")
pytest.importorskip("latex2mathml", reason="needs latex2mathml (pip install '.[docs]')")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project with pages of its own; all that pages link to is what it is here. Its environment has only MkDocs."""
    for path in documents.ROOT.iterdir():
        if path.name not in ("docs", "site", ".venv", ".git"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(documents.ROOT / "docs", tmp_path / "docs")
    program = tmp_path / ".venv/bin/mkdocs"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mkdocs "$@"\n')
    program.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    return tmp_path


def make_docs(project: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    return subprocess.run(["make", "docs"], cwd=project, env=environment, capture_output=True, text=True, check=False)


def test_a_broken_link_or_anchor_ends_the_build(project: Path) -> None:
    page = project / "docs/faq.md"
    page.write_text(f"{page.read_text()}\n[lost](nowhere.md) [lost](cli.md#no-such-part)\n")
    done = make_docs(project)
    assert done.returncode != 0
    assert "faq.md" in done.stderr
    assert "nowhere.md" in done.stderr
    assert "no-such-part" in done.stderr
    assert done.stderr.count("WARNING") == 2, "and nothing else is wrong with the copy"
