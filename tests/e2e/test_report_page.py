"""The report in a real browser: no network, no complaints, a phone, darkness, the keyboard and paper."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import Watched, focused, sideways

from fedprompt import Experiment

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.e2e

A4 = 794 - 98  # CSS pixels between the margins


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report on a grid of runs, one of them attacked and one with a name as long as they get."""
    folder = tmp_path_factory.mktemp("report")
    for method in ("head_tune", "fedvpt"):
        for domains in (1, 2):
            Experiment(tiny(folder, method, domains)).run()
    attacked = {"attack": {"kind": "nan", "fraction": 0.3}, "name": "attacked-" + "very-long-name-" * 6}
    Experiment({**tiny(folder, "fedvpt", 1), **attacked, "seed": 1}).run()
    command = [sys.executable, "-m", "fedprompt.cli", "report", "runs", "--output", "out"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "out" / "report.html").as_uri()


def tiny(folder: Path, method: str, domains: int) -> dict[str, object]:
    return {
        "name": f"m{domains}",
        "data": {"source": "tiny", "train_per_cell": 2, "test_per_cell": 2},
        "partition": {"scheme": "domains", "clients": 4, "domains_per_client": domains},
        "backbone": {"name": "tiny"},
        "method": {"name": method},
        "federation": {"rounds": 2},
        "output": {"directory": str(folder / "runs"), "cache": str(folder / "cache"), "threads": 1},
    }


def test_the_page_asks_for_nothing_and_nothing_in_it_is_refused(browser: Browser, report: str):
    page = browser.new_page()
    watched = Watched(page)
    page.goto(report)
    assert watched.requests == [report]
    assert watched.complaints == []
    assert page.locator("h1").inner_text() == "Comparison of runs"
    page.close()


def test_on_a_phone_only_boxes_scroll_sideways(browser: Browser, report: str):
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(report)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert sideways(page) == 0
    widths = page.eval_on_selector_all("svg", "all => all.map(each => each.getBoundingClientRect().width)")
    assert widths
    assert all(250 <= width <= 360 for width in widths)
    page.close()


def test_darkness_turns_page_and_pictures_round(browser: Browser, report: str):
    colours = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(report)
        colours[scheme] = [
            brightness(page.evaluate("getComputedStyle(document.body).backgroundColor")),
            brightness(page.evaluate("getComputedStyle(document.querySelector('h1')).color")),
            brightness(page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")),
        ]
        page.close()
    paper, ink, letters = colours["light"]
    assert paper > 0.9 > 0.4 > ink == letters
    paper, ink, letters = colours["dark"]
    assert paper < 0.2 < 0.7 < ink == letters


def brightness(colour: str) -> float:
    """The mean of red, green and blue, from 0 to 1."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3 / 255


def test_the_keyboard_reaches_skip_link_contents_tables_and_folds(browser: Browser, report: str):
    page = browser.new_page()
    page.goto(report)
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(focused(page))
    assert reached[0] == "A Skip to the results"
    assert "A Rejected updates" in reached
    assert "DIV Methods by settings" in reached
    assert "SUMMARY All figures, a table for every task" in reached
    page.close()


def test_a_fold_opens_with_a_key(browser: Browser, report: str):
    page = browser.new_page()
    page.goto(report)
    summary = page.locator("details.run > summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details.run").first.locator("dt", has_text="Config digest").is_visible()
    page.close()


def test_on_paper_no_table_is_cut_off_and_folded_numbers_are_open(browser: Browser, report: str):
    page = browser.new_page(viewport={"width": A4, "height": 1000}, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.goto(report)
    assert sideways(page) == 0
    too_wide = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.getAttribute('aria-label'))"
    assert page.eval_on_selector_all(".scroll", too_wide) == []
    assert page.locator("details", has_text="All figures").locator("th").first.is_visible()  # folded on the screen
    assert not page.locator("nav").is_visible()
    assert brightness(page.evaluate("getComputedStyle(document.querySelector('h1')).color")) < 0.4
    page.close()


def test_the_page_prints(browser: Browser, report: str, tmp_path: Path):
    page = browser.new_page()
    page.goto(report)
    content = page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) > 2
    page.close()
