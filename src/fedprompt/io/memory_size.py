"""How much memory this machine has."""

from __future__ import annotations

import os


def memory_bytes() -> int | None:
    """The bytes of physical memory; None where the system does not say (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
