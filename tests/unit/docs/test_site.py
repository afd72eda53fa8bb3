"""The site: it builds without a warning, its links and anchors lead somewhere, and its pages ask for nothing elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import documents
import pytest

pytestmark = pytest.mark.unit
pytest.importorskip("material", reason="needs mkdocs-material (pip install '.[docs]')")
pytest.importorskip("latex2mathml", reason="needs latex2mathml (pip install '.[docs]')")

LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


class Parts(HTMLParser):
    """Anchors, links and what a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=documents.ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@cache
def parts(path: Path) -> Parts:
    return Parts(path.read_text())


def pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def test_every_document_is_a_page_of_the_site(site: Path) -> None:
    written = {path.relative_to(documents.ROOT / "docs").with_suffix(".html") for path in documents.PAGES[1:]}
    assert written <= {path.relative_to(site) for path in pages(site)}


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    lost = []
    for page in pages(site):
        for link in parts(page).links:
            address = urlsplit(link)
            if address.scheme or link.startswith("//"):
                continue
            goal = (page.parent / unquote(address.path)).resolve() if address.path else page
            goal = goal / "index.html" if goal.is_dir() else goal
            anchored = not address.fragment or goal.suffix != ".html" or address.fragment in parts(goal).anchors
            if not goal.is_file() or not anchored:
                lost.append(f"{page.relative_to(site)}: {link}")
    assert lost == []


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        for address in parts(page).loads:
            assert not urlsplit(address).netloc, f"{page.relative_to(site)}: {address}"
            if not address.startswith("data:"):
                assert (page.parent / unquote(urlsplit(address).path)).is_file(), f"{page.relative_to(site)}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", sheet.read_text()), sheet.name


def test_equations_are_drawn_on_every_page_of_a_method(site: Path) -> None:
    for page in documents.METHOD_PAGES:
        drawn = site / "methods" / f"{page.stem}.html"
        assert "math" in parts(drawn).tags, page.stem
        assert 'class="arithmatex"' not in drawn.read_text()


def test_a_file_outside_docs_that_is_linked_is_in_the_site(site: Path) -> None:
    page = (site / "repository/src/fedprompt/configs/federation.yaml.html").read_text()
    assert "federation" in page
    assert (site / "repository/benchmarks/speed/scale.json").read_bytes() == (
        documents.ROOT / "benchmarks/speed/scale.json"
    ).read_bytes()


def test_tools_are_not_part_of_the_site(site: Path) -> None:
    assert not list(site.rglob("*.py"))


@pytest.mark.e2e
def test_search_works_in_pages_opened_from_the_disk_and_asks_for_nothing_elsewhere(site: Path) -> None:
    with browser.launched() as chromium:
        page = chromium.new_page(viewport={"width": 360, "height": 800})
        page.set_default_timeout(60_000)
        watched = browser.Watched(page)
        page.goto((site / "methods/fedotp.html").as_uri())
        assert browser.sideways(page) == 0
        page.click("label.md-header__button[for=__search]")
        page.locator("input.md-search__input").press_sequentially("implicit")
        page.wait_for_selector(".md-search-result__link")
        found = [link.get_attribute("href") or "" for link in page.query_selector_all(".md-search-result__link")]
        assert any("methods/pfedbayespt.html" in link for link in found)
        assert watched.complaints == []
        assert [address for address in watched.requests if not address.startswith(("file:", "data:"))] == []
