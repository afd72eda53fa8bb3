"""docs/architecture.md describes the source tree: rooms, layers, files."""

from __future__ import annotations

import re
from collections import Counter

import documents
import pytest
from rooms import layers

pytestmark = pytest.mark.unit

PACKAGE = documents.ROOT / "src/fedprompt"
PAGE = (documents.ROOT / "docs/architecture.md").read_text()
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
FILES = {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def test_the_page_shows_the_layers_of_the_import_contract() -> None:
    drawn = re.findall(r"```\n(cli\n.*?)```", PAGE, re.DOTALL)
    assert [[line.split(" · ") for line in block.splitlines()] for block in drawn] == [layers()]


def test_every_room_is_in_a_layer() -> None:
    assert sorted(name for layer in layers() for name in layer) == sorted(ROOMS | FILES)


def test_every_room_has_a_row_that_says_what_is_in_it() -> None:
    rows = re.findall(r"^\| `(\w+)(/|\.py)` \| .+ \|$", PAGE, re.MULTILINE)
    assert sorted(name for name, end in rows if end == "/") == sorted(ROOMS)
    assert sorted(name for name, end in rows if end == ".py") == sorted(FILES)


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", PAGE))
    within = [PACKAGE, documents.ROOT, PACKAGE / "data", PACKAGE / "privacy", PACKAGE / "engines", PACKAGE / "methods"]
    assert len(named) > 40
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in within)] == []


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []
