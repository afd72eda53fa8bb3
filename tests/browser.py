"""A real headless Chromium for tests of pages: the one of the system, driven by playwright.

Nothing is downloaded. Where `chromium` or the package is absent, tests that ask for it are skipped and say why.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (  # no sandbox in containers, no GPU, and no calls home
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def executable() -> str | None:
    """The browser of this system, if it has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """One browser process; skips the test where there is none to launch."""
    path = executable()
    if path is None:
        pytest.skip(f"needs a browser on PATH, one of {', '.join(NAMES)}")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the package playwright (pip install '.[dev]')"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(QUIET), headless=True)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """What a page asked for and complained about, from the moment it is watched."""

    def __init__(self, page: Page) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")


def sideways(page: Page) -> int:
    """By how many pixels the page is wider than its window: 0 where nothing but boxes of their own scroll sideways."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def focused(page: Page) -> str:
    """What the keyboard is on: `TAG name`, the name being its aria-label or its text."""
    return str(
        page.evaluate(
            "(e => e.tagName + ' ' + (e.getAttribute('aria-label') || e.textContent || '').trim().slice(0, 80))"
            "(document.activeElement)"
        )
    )
