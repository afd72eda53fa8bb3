"""Every extra of the package is on the page of installing, and `fedprompt doctor` looks for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedprompt.cli.doctor import OPTIONAL

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_on_the_page_of_installing(extra: str) -> None:
    assert f"| `[{extra}]` |" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev", "docs"}))
def test_the_doctor_looks_for_an_extra(extra: str) -> None:
    assert extra in OPTIONAL.values()
    assert all(each in EXTRAS for each in OPTIONAL.values())
