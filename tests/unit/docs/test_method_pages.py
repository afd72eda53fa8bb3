"""Pages of methods: there is one for each, and what is generated on them is what the code and the results say now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import documents
import method_pages
import pytest
from pydantic import Field
from support import module_at

from fedprompt.core import registry

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


NEW = ("fedvpt", "flow", "pfedpg", "promptfl", "pfedmoap", "fedprox")  # averaged or not, with and without text, wrapped


def test_a_method_without_a_page_gets_one_that_needs_no_other_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies(tmp_path, monkeypatch)
    for name in NEW:
        (tmp_path / f"{name}.md").unlink()
    assert generate.main(["--check"]) == 1
    assert "flow.md is missing or stale: run python docs/tools/generate.py" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert "docs/methods/flow.md is new: write its idea" in capsys.readouterr().out
    assert generate.stale() == []
    for name in NEW:
        assert_sections(tmp_path / f"{name}.md")
        assert_cells(tmp_path / f"{name}.md")
        assert len(documents.commands(tmp_path / f"{name}.md")) == 1
    assert (
        "Up and down: `prompt` (shared). Stays: `head.weight`, `head.bias` (local)."
        in (tmp_path / "fedvpt.md").read_text()
    )
    assert "| [`promptfl`](promptfl.md) | nothing | `context` | `context` |" in (tmp_path / "index.md").read_text()


def test_a_row_of_the_page_of_all_follows_the_page_of_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(tmp_path, monkeypatch)
    page = tmp_path / "coop.md"
    page.write_text(page.read_text().replace("personal: context", "personal: every word"))
    assert generate.stale() == ["index.md"]
    assert generate.main([]) == 0
    assert "| [`coop`](coop.md) | every word |" in (tmp_path / "index.md").read_text()


def copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh pages in a folder of the test."""
    for page in [*documents.METHOD_PAGES, documents.ROOT / "docs/methods/index.md"]:
        (folder / page.name).write_text(page.read_text())
    monkeypatch.setattr(generate, "PAGES", folder)
    generate.main([])


def assert_sections(page: Path) -> None:
    sections = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert sections[:5] == ["Rule", "What travels", "Settings", "Command", "Numbers"]
    assert "$" in page.read_text().partition("## What travels")[0], f"{page.name} needs an equation in its section Rule"


def assert_cells(page: Path) -> None:
    """A page says what its row on the page of all needs, and nothing else."""
    said = method_pages.front_matter(page.read_text())
    table = generate.family(page.stem, generate.known()[page.stem])
    assert list(said) == ["group", *generate.COLUMNS[table]], (
        f"{page.name} must begin with these lines, by the pattern of others"
    )
    assert all(isinstance(cell, str) and cell and "|" not in cell for cell in said.values())


@pytest.mark.parametrize("page", documents.METHOD_PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_sections_in_order(page: Path) -> None:
    assert_sections(page)
    assert_cells(page)


def test_every_page_is_in_the_navigation_once_in_the_order_of_groups() -> None:
    groups = [(group, pages) for entry in method_pages.navigation() for group, pages in entry.items()]
    names = [group for group, _ in groups]
    assert names == [group for group in method_pages.GROUPS if group in names]
    listed = [page for _, pages in groups for page in pages]
    assert sorted(listed) == [f"methods/{page.name}" for page in documents.METHOD_PAGES]


def test_a_page_that_names_no_group_or_a_new_one_comes_last(tmp_path: Path) -> None:
    for name, front in {"a": "", "b": "---\ngroup: New\n---\n", "c": "---\ngroup: Variants\n---\n"}.items():
        (tmp_path / f"{name}.md").write_text(f"{front}\n# Page\n")
    assert method_pages.navigation(tmp_path) == [
        {"Variants": ["methods/c.md"]},
        {method_pages.OTHERS: ["methods/a.md"]},
        {"New": ["methods/b.md"]},
    ]


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
