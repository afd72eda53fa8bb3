"""What tests of the command line share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from browser import launched

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")  # playwright keeps an event loop running: tests of other modules may want their own
def browser() -> Iterator[Browser]:
    """A headless Chromium for the tests of a module; each test opens pages of its own: `browser.new_page(...)`."""
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


@pytest.fixture
def complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`fedprompt ARGUMENTS` that must fail, in this process: its exit code and what it said. An import of torch takes longer."""
    from fedprompt.cli import main

    def call(*arguments: str, folder: Path = tmp_path) -> tuple[int, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("FEDPROMPT_CACHE", str(folder / "cache"))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["fedprompt", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return call
