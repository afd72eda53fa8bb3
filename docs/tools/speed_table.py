"""Write what docs/speed.md takes from benchmarks/speed/bench.json: the table of speeds, and its machine.

    python docs/tools/speed_table.py            # write it
    python docs/tools/speed_table.py --check    # exit code 1 if it is not what bench.json says

The part stands between `<!-- generated: speed -->` and `<!-- end -->`.
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
PAGE = ROOT / "docs/speed.md"

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


def table(lines: Sequence[Line]) -> str:
    """All lines, with the reason where there is no figure."""
    cells = [("", "ours", "the alternative", "ratio or figure", "target")]
    for line in lines:
        reason = f" ({line['why']})" if line["why"] else ""
        cells.append((line["what"], line["ours"], line["other"], figure(line), verdict(line) + reason))
    rows = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells]
    return "\n".join([rows[0], "|---" * 5 + "|", *rows[1:]])


def part(found: Mapping[str, Any]) -> str:
    """The text between the marks."""
    about = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = f"{about['cores']} cores ({about['architecture']}), one thread for each side; {versions}."
    return f"`{found['command']}` on {where}\n\n{table(found['rows'])}\n"


def renewed(text: str, content: str) -> str:
    """A page with another generated part."""
    page, count = PART.subn(lambda match: f"{match[1]}{content}{match[2]}", text)
    if count != 1:
        raise SystemExit(f"a page must have one part `<!-- generated: speed -->`, got {count}")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the table of speeds.")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    before = PAGE.read_text(encoding="utf-8")
    after = renewed(before, part(found))
    if after == before:
        return
    print(f"{'stale' if check else 'written'}: {PAGE.relative_to(ROOT)}")
    if check:
        raise SystemExit(1)
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
