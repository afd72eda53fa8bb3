"""docs/reference.md: it has every public name, and says what the code says now."""

from __future__ import annotations

import re
from pathlib import Path

import documents
import pytest
from support import module_at

import fedprompt

pytestmark = pytest.mark.unit

reference = module_at(documents.ROOT / "docs/tools/reference.py")


def test_the_page_is_not_stale() -> None:
    assert not reference.is_stale(), "run python docs/tools/reference.py"


def test_every_public_name_is_on_it() -> None:
    headings = re.findall(r"^### (.*)$", (documents.ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert sorted([*headings, "__version__"]) == sorted(fedprompt.__all__)


def test_an_old_page_is_told_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "reference.md"
    copy.write_text(reference.page().replace("Where clients run.", "Where they ran."))
    monkeypatch.setattr(reference, "PAGE", copy)
    assert reference.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
