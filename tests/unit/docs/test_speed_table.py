"""The table of speeds in docs/speed.md."""

from __future__ import annotations

from typing import Any

import pytest
import speed_table

pytestmark = pytest.mark.unit


def line(**changes: Any) -> dict[str, Any]:
    plain = {"what": "a", "ours": "1 s", "other": "2 s", "figure": 2.0, "unit": "x", "target": None}
    return {**plain, "at_most": False, "why": "", "met": None, **changes}


def test_a_line_says_whether_its_target_was_met() -> None:
    assert speed_table.verdict(line()) == "–"
    assert speed_table.verdict(line(target=1.5, met=True)) == "≥ 1.5x: met"
    assert speed_table.verdict(line(target=30, unit="%", met=False, at_most=True)) == "≤ 30 %: **missed**"
    assert speed_table.verdict(line(target=3, figure=None)) == "≥ 3x: not measured"


def test_a_line_without_a_figure_says_why() -> None:
    rows = speed_table.table(
        [line(), line(what="b", figure=None, why="no net"), line(what="c", unit="MB")]
    ).splitlines()
    assert rows[2] == "| a | 1 s | 2 s | 2x | – |"
    assert rows[3] == "| b | 1 s | 2 s | – | – (no net) |"
    assert rows[4].endswith("| 2 MB | – |")


def test_a_second_run_stands_beside_the_first() -> None:
    lines = [line(), line(what="b")]
    rows = speed_table.table(lines, [line(figure=2.5)]).splitlines()
    assert rows[0].split(" | ")[4] == "again"
    assert rows[2] == "| a | 1 s | 2 s | 2x | 2.5x | – |"
    assert rows[3] == "| b | 1 s | 2 s | 2x | – | – |"


def test_only_the_generated_part_of_a_page_changes() -> None:
    page = "before\n<!-- generated: speed -->\nold\n<!-- end -->\nafter\n"
    assert speed_table.renewed(page, "new\n") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="must have one part"):
        speed_table.renewed("no marks", "new\n")


def test_the_page_shows_what_the_stored_figures_say() -> None:
    text = speed_table.PAGE.read_text(encoding="utf-8")
    assert speed_table.renewed(text, speed_table.stored()) == text, "run docs/tools/speed_table.py"
