"""Pages of methods: there is one for each, and what is generated on them is what the code and the results say now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import documents
import pytest
from pydantic import Field
from support import module_at

from fedprompt import registry

pytestmark = pytest.mark.unit


generate = module_at(documents.ROOT / "docs/tools/generate.py")


def test_every_method_and_variant_has_a_page_and_every_page_is_of_one() -> None:
    assert {page.stem for page in documents.METHOD_PAGES} == set(generate.known())


def test_no_page_is_stale() -> None:
    assert generate.stale() == [], "run python docs/tools/generate.py"


def test_a_page_with_an_old_option_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies(tmp_path, monkeypatch)
    page = tmp_path / "fedvpt.md"
    page.write_text(page.read_text().replace("| `prompt_tokens` | `10` |", "| `prompt_tokens` | `11` |"))
    assert generate.stale() == ["fedvpt.md"]
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert "| `prompt_tokens` | `10` |" in page.read_text()
    assert generate.stale() == []


def test_a_page_without_a_place_for_its_numbers_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies(tmp_path, monkeypatch)
    page = tmp_path / "coop.md"
    page.write_text(page.read_text().replace("<!-- generated: numbers -->", ""))
    assert generate.stale() == ["coop.md"]


def test_a_method_without_a_page_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies(tmp_path, monkeypatch)
    (tmp_path / "flow.md").unlink()
    assert generate.main(["--check"]) == 1
    assert "flow.md" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"flow\.md must exist"):
        generate.main([])


def copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh pages in a folder of the test."""
    for page in documents.METHOD_PAGES:
        (folder / page.name).write_text(page.read_text())
    monkeypatch.setattr(generate, "PAGES", folder)
    generate.main([])


@pytest.mark.parametrize("page", documents.METHOD_PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_sections_in_order(page: Path) -> None:
    sections = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert sections[:5] == ["Rule", "What travels", "Settings", "Command", "Numbers"]
    assert "$" in page.read_text().partition("## What travels")[0], "an equation"


def test_the_table_of_options_names_every_setting_once() -> None:
    for name, cls in generate.known().items():
        table = generate.options(cls)
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [row["name"] for row in registry.describe(cls)]
        assert table.count("\n| ") or table == generate.NO_OPTIONS, name


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "whole number"),
        (Annotated[int, Field(ge=1)] | None, "whole number, ≥ 1 or null"),
        (Annotated[float, Field(gt=0, le=1)], "number, > 0, ≤ 1"),
        (Literal["own", "all"], "`own`, `all`"),
        (tuple[str, ...], "list of text"),
        (bool, "true, false"),
    ],
)
def test_values_of_a_setting_in_words(hint: Any, words: str) -> None:
    assert generate.values(hint) == words


def test_every_method_has_a_row_on_the_page_of_all() -> None:
    overview = (documents.ROOT / "docs/methods/index.md").read_text()
    for name in generate.known():
        assert f"]({name}.md)" in overview
