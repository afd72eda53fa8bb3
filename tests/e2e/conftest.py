"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from browser import launched

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium for all tests of pages; each test opens pages of its own: `browser.new_page(...)`."""
    with launched() as browser:
        yield browser


@pytest.fixture
def config(tmp_path: Path, settings: Any) -> Callable[..., str]:
    """A tiny config file; returns its name relative to the folder of the test."""

    def write(**changes: Any) -> str:
        values = settings(**changes)
        values["output"] = {"threads": 1}
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
        return "tiny.yaml"

    return write
