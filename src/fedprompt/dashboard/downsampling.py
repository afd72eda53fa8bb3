"""Downsampling, so that a run of ten thousand rounds or a hundred thousand clients is shown as fast as a short one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from fedprompt.io.safe_text import safe_line

POINTS = 300  # of a curve, at most twice as many
Item = TypeVar("Item")


def stride(count: int, most: int = POINTS) -> int:
    """Keep every n-th point; n is a power of two, so that a growing curve is rarely sent again."""
    return 1 if count <= 2 * most else 2 ** math.ceil(math.log2(count / (2 * most)))


def kept(count: int, every: int, after: int = -1) -> list[int]:
    """Indices of a curve to show after an index: every n-th, and the last."""
    first = (after // every + 1) * every
    places = list(range(max(first, 0), count, every))
    return places if not count or places[-1:] == [count - 1] or after >= count - 1 else [*places, count - 1]


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """A limited number of items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def ends_and_middle(items: Sequence[Item], most: int) -> list[Item]:
    """A limited number of sorted items: a third from the start, a third around the middle, a third from the end."""
    if len(items) <= most:
        return list(items)
    part = most // 3
    middle = (len(items) - part) // 2
    return [*items[:part], *items[middle : middle + part], *items[-part:]]


def clip(text: str, most: int) -> str:
    """A printable text of limited length."""
    return safe_line(text if len(text) <= most else f"{text[:most]}…")


def plain(value: Any) -> Any:
    """The same for JSON: numbers that are not finite become null, texts are made printable and cut."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return clip(value, 4000)
    if isinstance(value, dict):
        return {clip(str(key), 4000): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
