"""Write what docs/speed.md takes from benchmarks/speed/bench.json: the table of speeds, and its machine.

A second run of the whole benchmark, bench_again.json, adds a column: what differs between them is the spread.

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
FIGURES, AGAIN = (ROOT / "benchmarks/speed" / name for name in ("bench.json", "bench_again.json"))
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


def table(lines: Sequence[Line], again: Sequence[Line] = ()) -> str:
    """All lines, with the reason where there is no figure, and the figures of a second run beside them."""
    second = {line["what"]: figure(line) for line in again}
    cells = [("", "ours", "the alternative", "ratio or figure", *(["again"] if second else []), "target")]
    for line in lines:
        reason = f" ({line['why']})" if line["why"] else ""
        beside = [second.get(line["what"], "–")] if second else []
        cells.append((line["what"], line["ours"], line["other"], figure(line), *beside, verdict(line) + reason))
    rows = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells]
    return "\n".join([rows[0], "|---" * len(cells[0]) + "|", *rows[1:]])


def part(found: Mapping[str, Any], again: Mapping[str, Any] | None = None) -> str:
    """The text between the marks."""
    about = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = f"{about['cores']} cores ({about['architecture']}), one thread for each side; {versions}."
    return f"`{found['command']}` on {where}\n\n{table(found['rows'], again['rows'] if again else ())}\n"


def stored() -> str:
    """What the stored figures say."""
    found, again = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in (FIGURES, AGAIN)
    )
    return part(found, again)


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
    before = PAGE.read_text(encoding="utf-8")
    after = renewed(before, stored())
    if after == before:
        return
    print(f"{'stale' if check else 'written'}: {PAGE.relative_to(ROOT)}")
    if check:
        raise SystemExit(1)
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
