"""Write what README.md and docs/speed.md take from benchmarks/speed/bench.json: the table of speeds, and its machine.

    python docs/tools/speed_table.py            # write them
    python docs/tools/speed_table.py --check    # exit code 1 if one of them is not what bench.json says

A part stands between `<!-- generated: speed -->` and `<!-- end -->`. README.md has the ratios, docs/speed.md every line.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "benchmarks/speed/bench.json"
PART = re.compile(r"(<!-- generated: speed -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = {ROOT / "README.md": False, ROOT / "docs/speed.md": True}  # whether a page shows every line

Line = Mapping[str, Any]


def verdict(line: Line) -> str:
    """What the target of a line came to."""
    if line["target"] is None:
        return "–"
    met = {True: "met", False: "**missed**", None: "not measured"}[line["met"]]
    return f"{'≤' if line['at_most'] else '≥'} {line['target']:g} {line['unit']}: {met}".replace(" x:", "x:")


def figure(line: Line) -> str:
    if line["figure"] is None:
        return "–"
    return f"{line['figure']:.3g}" + ("x" if line["unit"] == "x" else f" {line['unit']}")


def table(lines: Sequence[Line], whole: bool) -> str:
    """Lines with a figure, or all of them with the reason of those without."""
    shown = [line for line in lines if whole or (line["unit"] == "x" and line["figure"] is not None)]
    cells = [("", "ours", "the alternative", "ratio or figure", "target")]
    for line in shown:
        reason = f" ({line['why']})" if whole and line["why"] else ""
        cells.append((line["what"], line["ours"], line["other"], figure(line), verdict(line) + reason))
    rows = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells]
    return "\n".join([rows[0], "|---" * 5 + "|", *rows[1:]])


def part(found: Mapping[str, Any], whole: bool) -> str:
    """The text between the marks."""
    about = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = f"{about['cores']} cores ({about['architecture']}), one thread for each side; {versions}."
    return f"`{found['command']}` on {where}\n\n{table(found['rows'], whole)}\n"


def renewed(text: str, content: str) -> str:
    """A page with another generated part."""
    page, count = PART.subn(lambda match: f"{match[1]}{content}{match[2]}", text)
    if count != 1:
        raise SystemExit(f"a page must have one part `<!-- generated: speed -->`, got {count}")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of speeds.")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    stale = []
    for path, whole in PAGES.items():
        before = path.read_text(encoding="utf-8")
        after = renewed(before, part(found, whole))
        if after != before:
            stale.append(path)
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    raise SystemExit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
