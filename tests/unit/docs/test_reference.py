"""docs/reference.md has every public name. That its text is not stale is tested with the other generated files."""

from __future__ import annotations

import re

import documents
import pytest

import fedprompt

pytestmark = pytest.mark.unit


def test_every_public_name_is_on_it() -> None:
    headings = re.findall(r"^### (.*)$", (documents.ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert sorted([*headings, "__version__"]) == sorted(fedprompt.__all__)
