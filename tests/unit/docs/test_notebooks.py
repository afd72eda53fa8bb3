"""The notebooks of docs/notebooks: every cell runs in IPython's own shell, and shows what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import documents
import pytest
from notebook_shell import notebook

from fedprompt.core.registry import METHODS

pytestmark = pytest.mark.unit

NOTEBOOKS = sorted((documents.ROOT / "docs/notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    book = json.loads(path.read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(METHODS, "_table", dict(METHODS.table()))
    shown: list[Any] = []
    with notebook() as shell:
        for code in cells(path):
            done = shell.run_cell(code)
            assert done.success, f"{path.name}: {done.error_in_exec or done.error_before_exec}"
            shown.append(done.result)
        formats = set().union(*(shell.display_formatter.format(each)[0] for each in shown if each is not None))
    assert formats & {"text/html", "image/png"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_kept(path: Path) -> None:
    book = json.loads(path.read_text())
    assert not [cell for cell in book["cells"] if cell.get("outputs") or cell.get("execution_count")]
