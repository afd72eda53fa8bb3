"""A notebook without a browser: IPython's own shell in this process, and what it displays."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def notebook() -> Iterator[Any]:
    """A shell that `rich` and others take for Jupyter's; afterwards this process is none again."""
    shells = pytest.importorskip("IPython.core.interactiveshell")
    publisher = pytest.importorskip("IPython.core.displaypub")
    kind = type("ZMQInteractiveShell", (shells.InteractiveShell,), {})  # by this name they know it
    prompts = {name: getattr(sys, name) for name in ("ps1", "ps2", "ps3") if hasattr(sys, name)}
    hooks = sys.displayhook, sys.excepthook
    shell = kind.instance(display_pub_class=publisher.CapturingDisplayPublisher)
    try:
        yield shell
    finally:
        kind.clear_instance()
        sys.displayhook, sys.excepthook = hooks
        if hasattr(builtins, "get_ipython"):
            del builtins.get_ipython
        for name in ("ps1", "ps2", "ps3"):
            if name in prompts:
                setattr(sys, name, prompts[name])
            elif hasattr(sys, name):
                delattr(sys, name)


def displayed(shell: Any, kind: str = "text/html") -> list[str]:
    """What was displayed so far in one format, updates of earlier outputs included."""
    return [each["data"][kind] for each in shell.display_pub.outputs if kind in each["data"]]
