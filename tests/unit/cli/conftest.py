"""The command line in this process: no import of torch for every call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fedprompt.cli import main


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fedprompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """`fedprompt ARGUMENTS` in an empty folder with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDPROMPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["fedprompt", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Answer(int(ended.value.code or 0), *capsys.readouterr())

    return call
