"""What the pages of methods say about themselves in their first lines: their place in the navigation, and their row on the page of all.

---
group: Baselines
personal: head
up: prompt
---
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PAGES = Path(__file__).resolve().parents[1] / "methods"
FRONT = re.compile(r"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)
OTHERS = "Others"
GROUPS = (
    "Baselines",
    "Prompts per image",
    "Prompts per client or cluster",
    "Low-rank weights",
    "Class names, baselines",
    "Class names, personal",
    "Class names, shared",
    "Variants",
    OTHERS,
)  # in the order of the navigation; a group that is not here comes last


def front_matter(text: str) -> dict[str, Any]:
    found = FRONT.match(text)
    return (yaml.safe_load(found[1]) or {}) if found else {}


def all_pages(folder: Path = PAGES) -> dict[str, dict[str, Any]]:
    """What every page says about itself, by the name of its method, in the order of the navigation."""
    pages = [path for path in folder.glob("*.md") if path.name != "index.md"]
    return in_order({path.stem: front_matter(path.read_text()) for path in pages})


def in_order(said: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Group by group, and by name in a group."""

    def place(name: str) -> tuple[int, str, str]:
        group = said[name].get("group", OTHERS)
        return (GROUPS.index(group) if group in GROUPS else len(GROUPS), group, name)

    return {name: said[name] for name in sorted(said, key=place)}


def navigation(folder: Path = PAGES) -> list[dict[str, list[str]]]:
    """The groups of pages, as `nav` of mkdocs.yml has them."""
    groups: dict[str, list[str]] = {}
    for name, said in all_pages(folder).items():
        groups.setdefault(said.get("group", OTHERS), []).append(f"methods/{name}.md")
    return [{group: pages} for group, pages in groups.items()]
