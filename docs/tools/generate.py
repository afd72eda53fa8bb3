"""Write the generated parts of the pages in docs/methods: options from the registry, numbers from benchmarks/accuracy.

    python docs/tools/generate.py            # write them
    python docs/tools/generate.py --check    # say which pages are stale; exit code 1 if there are any

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. Everything else on a page is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from fedprompt import registry
from fedprompt.papers.results import Result
from fedprompt.report.results import NOTHING, load_all, method_numbers

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/methods"
PART = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
NO_OPTIONS = "It has no settings."
NO_NUMBERS = "No stored result has it yet. `fedprompt compare RUN...` prints those of your own runs."
READING = (
    "Accuracy in per cent, mean ± standard deviation over seeds. What was run, on what: follow the link. Ours are small runs; "
    "the paper's numbers, where there are any, are of its own images, backbone and number of rounds: compare orders, not values."
)


def known() -> dict[str, Any]:
    """Every method and variant of this package by name; those of other packages have no page here."""
    classes = {**registry.methods(), **registry.variants()}
    return {name: cls for name, cls in classes.items() if cls.__module__.startswith("fedprompt.methods.")}


@cache
def options(cls: Any) -> str:
    """The settings of a method as a table: name, default, what it is and what it may be."""
    rows = registry.describe(cls)
    if not rows:
        return NO_OPTIONS
    hints = typing.get_type_hints(cls, include_extras=True)
    symbols = {setting: symbol for symbol, setting in cls.symbols.items()}
    lines = ["| option | default | what it is |", "|---|---|---|"]
    for row in rows:
        also = f"; also `{symbols[row['name']]}`" if row["name"] in symbols else ""
        what = f"{escaped(row['help'])}{also} · {values(hints[row['name']])}"
        lines.append(f"| `{row['name']}` | `{written(row['default'])}` | {what} |")
    return "\n".join(lines)


def written(value: Any) -> str:
    """A default as it would stand in YAML."""
    return json.dumps(value) if not isinstance(value, str) or not value else value


def values(hint: Any) -> str:
    """What a type allows, in few words: choices by name, numbers by their range."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounds = [bound for extra in arguments[1:] for bound in limits(extra)]
        return ", ".join([values(arguments[0]), *bounds])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"list of {values(arguments[0])}"
    if arguments:  # a union
        return " or ".join(dict.fromkeys(values(each) for each in arguments))
    names = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def limits(extra: Any) -> list[str]:
    """The bounds that a pydantic `Field` sets on a number."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [extra, *getattr(extra, "metadata", ())]
    return [f"{sign} {getattr(each, name):g}" for each in found for name, sign in signs.items() if hasattr(each, name)]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def numbers(results: Sequence[Result], name: str) -> str:
    """A table for each experiment the method is in, with the paper's column where the paper has numbers."""
    lines = method_numbers(results, name, "../results.md").splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    blocks = [READING]
    for experiment, rows in groupby(cells, key=lambda row: row[0]):
        body = [row[1:] for row in rows]
        width = 4 if any(row[-1] != NOTHING for row in body) else 3
        header = ["setting", "Average", "Worst Local", "the paper's: Average / Worst Local"][:width]
        table = [header, ["---"] + ["---:"] * (width - 1), *(row[:width] for row in body)]
        blocks += [f"**{experiment}**", "\n".join(f"| {' | '.join(line)} |" for line in table)]
    return "\n\n".join(blocks) if cells else NO_NUMBERS


def renewed(text: str, parts: Mapping[str, str]) -> str:
    """The page with its generated parts as they are now."""
    return PART.sub(lambda found: f"<!-- generated: {found[1]} -->\n\n{parts[found[1]].strip()}\n\n<!-- end -->", text)


def pages() -> dict[Path, str]:
    """Every page of a method and what it should say."""
    results = load_all(ROOT / "benchmarks/accuracy")
    made = {}
    for name, cls in known().items():
        path = PAGES / f"{name}.md"
        text = path.read_text() if path.is_file() else ""
        made[path] = renewed(text, {"options": options(cls), "numbers": numbers(results, name)})
    return made


def stale() -> list[str]:
    """Names of pages that are missing, lack a generated part or say something old."""
    found = []
    for path, text in pages().items():
        whole = {"options", "numbers"} == {part[1] for part in PART.finditer(text)}
        if not whole or not path.is_file() or path.read_text() != text:
            found.append(path.name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    if parser.parse_args(arguments).check:
        old = stale()
        for name in old:
            print(f"docs/methods/{name} is stale: run python docs/tools/generate.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in pages().items():
        if not text:
            raise SystemExit(f"docs/methods/{path.name} must exist: write its prose first, by the pattern of fedvpt.md")
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
