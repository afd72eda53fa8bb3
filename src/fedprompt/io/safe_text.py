"""Text from outside, made fit to be shown: names and messages of run files, configs, sites and data sets.

A terminal obeys what it is sent, and a spreadsheet computes what it is given. So nothing but letters that can be seen gets
there: no control characters, hence no escape sequences, and none of the invisible marks that turn the direction of writing.
JSON is exact and needs none of this: it escapes by itself.
"""

from __future__ import annotations

import re

UNSEEN = "\ufffd"  # replaces characters that cannot be shown
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # what spreadsheets take for the beginning of one
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def safe_line(text: str) -> str:
    """One line; breaks and tabs become spaces."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " if each.isspace() else UNSEEN for each in text)


def safe_text(text: str) -> str:
    """Lines, each of them safe."""
    return "\n".join(safe_line(line) for line in text.split("\n"))


def safe_cell(text: str) -> str:
    """A safe cell of a CSV file: a text that looks like a formula gets an apostrophe, a number does not."""
    line = safe_line(text)
    return f"'{line}" if line.lstrip().startswith(FORMULA) and not _NUMBER.fullmatch(line) else line
