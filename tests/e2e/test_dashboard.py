"""The live page in a real browser: it follows, filters, compares, and outlives runs that break or go away."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import Watched, focused, sideways
from dashboard_support import begin, commit, write
from warm_processes import Started

from fedprompt.report import comparison_table
from fedprompt.runs.run import Run
from fedprompt.runs.tables import FILE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.e2e

PATIENCE = 120_000  # milliseconds; a busy machine is no error
HASTE = (
    "const slow = setTimeout; setTimeout = (call, pause) => slow(call, pause / 6)"  # between two questions of a page
)
Open = Callable[..., "Page"]


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[str]:
    """The command in a process of its own; its address."""
    process = Started(folder.parent, ("dashboard", str(folder), "--port", str(port)), plant=looks_often)
    try:
        process.wait_for("(Ctrl-C ends it)")
        found = re.search(r"http://\S+", process.words)
        assert found is not None
        yield found[0]
    finally:
        process.interrupt()
        process.end()


def looks_often() -> None:
    """Plant: a server that sees new runs sooner, and knows sooner that a run was stopped where no locks can be seen."""
    from fedprompt.dashboard import liveness, run_list

    run_list.SCAN, liveness.RECENT = 0.1, 3.0


def hurried(page: Page) -> Page:
    page.set_default_timeout(PATIENCE)
    page.add_init_script(HASTE)
    return page


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with serving(folder) as found:
        yield found


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Open]:
    """A page at a view; at the end nobody may have complained, and nobody else may have been asked."""
    watched: list[Watched] = []
    pages: list[Page] = []

    def make(view: str = "#/", width: int = 1280, height: int = 900) -> Page:
        page = hurried(browser.new_page(viewport={"width": width, "height": height}))
        watched.append(Watched(page))
        pages.append(page)
        page.goto(address + view)
        page.wait_for_selector(".connection[data-state=live]")
        return page

    yield make
    for page in pages:
        page.close()
    for each in watched:
        assert [request for request in each.requests if not request.startswith(address)] == []
        gone = ("status of 404", "status of 409")  # a run that is deleted, or damaged in the moment it is asked for
        assert [text for text in each.complaints if not any(status in text for status in gone)] == []


def rows(page: Page) -> list[str]:
    return page.locator(".runs tbody tr .col-name a").all_inner_texts()


def text(page: Page, selector: str) -> str:
    return page.locator(selector).first.inner_text()


def wait_for(page: Page, selector: str, words: str) -> None:
    page.locator(selector, has_text=words).first.wait_for()


def count(page: Page, selector: str, expected: int) -> None:
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_count(
        expected, timeout=PATIENCE
    )  # `wait_for_function` needs the eval that the page forbids


def changed(page: Page, selector: str, before: str) -> None:
    from playwright.sync_api import expect

    expect(page.locator(selector).first).not_to_have_text(before, timeout=PATIENCE)


def choose(page: Page, name: str) -> str:
    """Go to a run's page; returns its id."""
    page.get_by_role("link", name=name, exact=True).click()
    page.wait_for_selector(".tiles")
    return page.url.rpartition("/")[2]


def test_the_list_shows_runs_and_their_names_as_text(folder: Path, visit: Open) -> None:
    write(folder / "good", [[4, 8]], method={"name": "fedvpt"})
    write(folder / "<img src=x onerror=alert(1)>", [[5]])
    page = visit()
    count(page, ".runs tbody tr", 2)
    assert sorted(rows(page)) == ["<img src=x onerror=alert(1)>", "good"]
    assert page.locator("img").count() == 0
    line = page.locator(".runs tbody tr", has_text="good").inner_text().split()
    assert {"finished", "fedvpt", "60.00", "40.00"} <= set(line)


def test_a_running_experiment_is_followed_until_it_is_stopped(
    tmp_path: Path, config: Callable[..., str], visit: Open
) -> None:
    page = visit()
    wait_for(page, ".notice", "No runs in")
    cache = str(tmp_path / "cache")
    training = Started(tmp_path, ("run", config(federation={"rounds": 5000}), "--quiet"), FEDPROMPT_CACHE=cache)
    try:
        wait_for(page, ".badge", "running")  # it appeared by itself
        choose(page, "tiny-fedvpt-seed0")
        seen = []
        for _ in range(3):
            shown = text(page, ".tile .value")
            seen.append(int(shown.split("/")[0]))
            changed(page, ".tile .value", shown)
        assert seen == sorted(set(seen))
        page.wait_for_selector(".chart path.curve", state="attached")
        assert text(page, ".tile:has-text('Left') .value") != "–"
    finally:
        training.interrupt()
        training.end()
    wait_for(page, ".heading .badge", "stopped")
    store = Run(tmp_path / "runs" / "tiny-fedvpt-seed0")
    wait_for(page, ".tile .value", f"{store.rounds()[-1].round} / 5000")
    store.close()


def test_runs_are_filtered_and_sorted_and_the_address_keeps_it(folder: Path, visit: Open) -> None:
    write(folder / "a", [[1]], method={"name": "fedvpt"})
    write(folder / "b", [[9]], method={"name": "head_tune"})
    write(folder / "c", [[5]], rounds=3, method={"name": "head_tune"})
    page = visit()
    count(page, ".runs tbody tr", 3)
    page.get_by_role("button", name="Average (final)", exact=True).click()
    assert rows(page) == ["b", "c", "a"]
    page.get_by_label("Method", exact=True).select_option("head_tune")
    assert rows(page) == ["b", "c"]
    page.get_by_label("Status", exact=True).select_option("stopped")
    assert rows(page) == ["c"]
    page.get_by_label("Filter", exact=True).fill("nothing like this")
    assert page.locator(".runs").is_hidden()
    page.get_by_label("Filter", exact=True).fill("HEAD")
    page.wait_for_url("**q=HEAD**")  # the browser tells of a new address a little later
    again = visit(page.url.partition("/#")[2].join(["#", ""]))
    count(again, ".runs tbody tr", 1)
    assert rows(again) == ["c"]
    assert again.get_by_label("Filter", exact=True).input_value() == "HEAD"
    page.get_by_role("button", name="Clear filters").click()
    assert rows(page) == ["b", "c", "a"]


def test_ticked_runs_are_compared_as_the_command_does(folder: Path, visit: Open) -> None:
    names = ["a", "b", "c"]
    for name, seed, answers in zip(names, (0, 1, 0), ([[4, 6]] * 2, [[8, 8]] * 2, [[9, 9]] * 2), strict=True):
        write(folder / name, answers, seed=seed, method={"name": "head_tune" if name == "c" else "fedvpt"})
    page = visit()
    for name in names:
        page.get_by_label(f"Select {name}", exact=True).check()
    page.get_by_role("link", name="Compare").click()
    page.wait_for_selector("table.comparison tbody tr")
    opened = [Run(folder / name) for name in names]
    made = comparison_table.comparison(opened)
    expected = [[cell.text for cell in line] for line in comparison_table.cells(made, comparison_table.columns(made))]
    shown = [line.locator("th, td").all_inner_texts() for line in page.locator("table.comparison tbody tr").all()]
    assert shown == expected
    assert page.locator("table.comparison b").all_inner_texts() == [
        cell.text for line in comparison_table.cells(made, comparison_table.columns(made)) for cell in line if cell.bold
    ]
    assert page.locator("figure.chart").count() == 3
    assert page.locator("figure.chart").first.locator("g path.curve").count() == 2
    page.get_by_role("link", name="Take c out of the comparison").click()
    count(page, "table.comparison tbody tr", 1)
    for run in opened:
        run.close()


def test_the_list_outlives_runs_that_appear_break_and_go_away(folder: Path, visit: Open) -> None:
    write(folder / "first", [[5]])
    page = visit()
    wait_for(page, ".col-name a", "first")
    page.get_by_label("Select first", exact=True).check()
    write(folder / "second", [[5], [6]])
    wait_for(page, ".col-name a", "second")
    (folder / "second" / FILE).write_bytes(os.urandom(5000))
    wait_for(page, ".runs tr[data-status=damaged]", "second")
    assert "not a readable run file" in text(page, ".runs tr[data-status=damaged] .reason")
    assert page.get_by_label("Select first", exact=True).is_checked()
    shutil.rmtree(folder / "second")
    count(page, ".runs tbody tr", 1)
    assert rows(page) == ["first"]


def test_the_page_of_a_run_outlives_its_damage_deletion_and_return(folder: Path, visit: Open) -> None:
    file = write(folder / "run", [[5, 6], [6, 7]]) / FILE
    content = file.read_bytes()
    page = visit()
    id = choose(page, "run")
    wait_for(page, ".tile .value", "2 / 2")
    file.write_bytes(content[: len(content) // 2])
    wait_for(page, ".notice.bad", "This run is damaged.")
    assert page.locator(".chart path.curve").count()  # what was known stays in sight
    shutil.rmtree(file.parent)
    wait_for(page, ".notice.bad", "This run is gone")
    write(folder / "run", [[5, 6], [6, 7], [8, 8]])
    wait_for(page, ".tile .value", "3 / 3")
    page.wait_for_selector(".notice.bad", state="hidden")
    comparison = visit(f"#/compare/{id}")
    comparison.wait_for_selector("table.comparison")
    file.write_bytes(b"broken")
    wait_for(comparison, ".notice", "run is left out")
    shutil.rmtree(file.parent)
    wait_for(comparison, ".notice", "1 run gone")


def test_a_lost_connection_is_told_and_found_again(folder: Path, browser: Browser) -> None:
    write(folder / "run", [[5]])
    page = hurried(browser.new_page())
    with serving(folder) as address:
        page.goto(address)
        wait_for(page, ".col-name a", "run")
    wait_for(page, ".connection", "Lost connection")
    assert rows(page) == ["run"]
    write(folder / "later", [[5]])
    with serving(folder, int(address.rstrip("/").rpartition(":")[2])):
        wait_for(page, ".connection[data-state=live]", "Live")
        wait_for(page, ".col-name a", "later")
    page.close()


def test_updates_keep_the_place_and_what_is_typed(folder: Path, visit: Open) -> None:
    for number in range(40):
        write(folder / f"still-{number:02d}", [[5]])
    store = begin(folder / "moving", rounds=50)
    page = visit()
    count(page, ".runs tbody tr", 41)
    page.get_by_label("Filter", exact=True).fill("i")
    page.evaluate("scrollTo(0, 600)")
    place = page.evaluate("scrollY")
    node = page.locator(".runs tbody tr").nth(20).element_handle()
    commit(store, 1, [5, 6, 7])
    wait_for(page, ".runs tr", "1 / 50")
    assert place == page.evaluate("scrollY") == 600
    assert focused(page).startswith("INPUT")
    assert node.evaluate("node => node.isConnected")  # updated, not made anew
    store.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_no_view_is_wider_than_its_window(width: int, folder: Path, visit: Open) -> None:
    store = begin(folder / ("a-very-long-name-of-a-run-" * 5), clients=60, rounds=3)
    commit(store, 1, [client % 11 for client in range(60)])
    commit(store, 2, [client % 11 for client in range(60)])
    store.close()
    write(folder / "other", [[5, 5]], method={"name": "head_tune"})
    (folder / "broken").mkdir()
    (folder / "broken" / FILE).write_bytes(b"nothing")
    page = visit(width=width, height=740)
    count(page, ".runs tbody tr", 3)
    assert sideways(page) == 0
    page.evaluate("for (const box of document.querySelectorAll('.runs tbody input')) box.click()")
    page.get_by_role("link", name="Compare").click()
    page.wait_for_selector("table.comparison tbody tr")
    page.wait_for_selector(".chart path.curve", state="attached")
    assert sideways(page) == 0
    page.locator(".chips a", has_text="a-very-long").first.click()
    page.wait_for_selector("figure.chart rect[fill]")
    page.locator(".settings summary").click()
    page.wait_for_selector(".pairs")
    assert sideways(page) == 0


def test_everything_can_be_reached_with_the_keyboard(folder: Path, visit: Open) -> None:
    write(folder / "run", [[4, 6], [5, 7]])
    page = visit()
    wait_for(page, ".col-name a", "run")
    page.get_by_label("Filter", exact=True).focus()
    for _ in range(30):
        page.keyboard.press("Tab")
        if focused(page) == "INPUT Select run":
            break
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    assert focused(page) == "A run"
    page.keyboard.press("Tab")
    assert focused(page) == "A Compare"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chart path.curve", state="attached")
    page.locator(".plot").first.focus()
    assert text(page, ".readout") == "Round 2: Average 60.00 %, Worst Local 50.00 %"
    page.keyboard.press("ArrowLeft")
    assert text(page, ".readout") == "Round 1: Average 50.00 %, Worst Local 40.00 %"
    page.wait_for_selector("rect[fill]")
    page.locator(".plot").nth(1).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert text(page, "figure:has(rect[fill]) .readout") == "client_1, round 2: 70.00 %"
    assert page.locator("#connection").get_attribute("aria-live") == "polite"


def test_a_dark_page_stays_readable(folder: Path, browser: Browser, address: str) -> None:
    write(folder / "run", [[5]])
    page = hurried(browser.new_page(color_scheme="dark"))
    page.goto(address)
    wait_for(page, ".col-name a", "run")
    shades = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        ".map(text => text.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0))"
    )
    assert shades[0] < 150 < 600 < shades[1]
    page.close()
