"""The panel of a run in a notebook: one output that is replaced while the run goes on. It needs no JavaScript."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

EVERY = 0.2  # seconds, at least, between two updates: each is a message to the browser
FRAME = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class NotebookPanel:
    """Used like `rich.live.Live`, which in notebooks needs one more package."""

    def __init__(self, panel: RenderableType, now: Callable[[], float] = time.monotonic) -> None:
        self._panel, self._now, self._shown = panel, now, now()
        self._output: Any = None

    def start(self) -> None:
        from IPython.display import HTML, display

        self._output = display(HTML(as_html(self._panel)), display_id=True)

    def update(self, panel: RenderableType) -> None:
        if self._now() - self._shown >= EVERY:
            self._shown = self._now()
            self._put(as_html(panel))

    def stop(self) -> None:
        """Nothing stays, as on a terminal."""
        self._put("")

    def _put(self, markup: str) -> None:
        from IPython.display import HTML

        if self._output is not None:
            self._output.update(HTML(markup))


def as_html(panel: RenderableType) -> str:
    """What a terminal would show, escaped."""
    console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False, force_terminal=True)
    console.print(panel)
    return console.export_html(inline_styles=True, code_format=FRAME)
