"""The threat model names the test that shows each of its claims: these tests must exist where it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit

NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+(?:\.py)?)`")
ADVERSARIES = ("curious server", "cheating server", "cheating site", "stranger on the network", "stranger's")


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Adversary and tests of all rows of the tables of threats."""
    inside = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        inside = line.startswith("|") and (inside or [cell.strip("| ") for cell in cells][:2] == ["adversary", "asset"])
        if inside and len(cells) == 4 and not set(line) <= set("|- ") and cells[0] != "adversary":
            yield cells[0], cells[3]


def missing(page: str) -> list[str]:
    """Tests that the tables name and that do not exist. A function belongs to the file that was named last."""
    file, absent = ROOT / "tests/unit/engines/test_cheating_server.py", []
    for _, tests in rows(page):
        for name in NAMED.findall(tests):
            if name.endswith(".py"):
                file = ROOT / name if "/" in name else _beside(file, name)
                found = file.is_file()
            else:
                found = f"def {name}(" in file.read_text(encoding="utf-8")
            absent += [] if found else [name]
    return absent


def _beside(file: Path, name: str) -> Path:
    near = file.with_name(name)
    return near if near.is_file() else ROOT / "tests/unit/engines" / name


def page() -> str:
    return (ROOT / "docs/deploy.md").read_text(encoding="utf-8")


def test_every_test_that_the_threat_model_names_exists() -> None:
    assert missing(page()) == []


def test_every_row_of_the_threat_model_names_a_test_and_every_adversary_has_a_row() -> None:
    found = list(rows(page()))
    assert len(found) > 25
    assert [adversary for adversary, tests in found if not NAMED.search(tests)] == []
    for adversary in ADVERSARIES:
        assert any(adversary in each for each, _ in found), adversary


@pytest.mark.parametrize("name", ["test_no_such_fact", "tests/unit/engines/test_no_such_file.py", "test_no_file.py"])
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert missing(f"| adversary | asset | what protects it | test |\n|---|---|---|---|\n| a | b | c | `{name}` |") == [
        name
    ]
