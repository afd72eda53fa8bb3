"""The documents of the project for tests: which pages there are, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHOD_PAGES = sorted(path for path in (ROOT / "docs/methods").glob("*.md") if path.name != "index.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\.venv/bin/)?fedprompt (.*)$", re.MULTILINE)


@cache
def commands(path: Path) -> list[list[str]]:
    """The words behind `fedprompt` of every command in a block of code, continued lines joined, remarks left out."""
    blocks = [block.replace("\\\n", " ") for block in BLOCK.findall(path.read_text())]
    return [shlex.split(words, comments=True) for block in blocks for words in COMMAND.findall(block)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))
