"""Write what documents take from code and results: options, numbers and rows of methods, settings, reference, the schema of configs.

    python docs/tools/generate.py            # write them
    python docs/tools/generate.py --check    # say which files are stale; exit code 1 if there are any

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. Everything else on a page is written by hand. A method
without a page gets a first one.
"""

from __future__ import annotations

import argparse
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from method_pages import front_matter, in_order
from new_page import UNKNOWN, new_page
from reference import reference_page
from settings_page import tables as settings_tables
from value_words import escaped, values, written

from fedprompt.cli.config_schema import as_text, config_schema
from fedprompt.core import registry
from fedprompt.papers.result_file import Result
from fedprompt.papers.results_page import NOTHING, load_all, method_numbers

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/methods"
SETTINGS = ROOT / "docs/settings.md"
SCHEMA = ROOT / "src/fedprompt/schema.json"
REFERENCE = ROOT / "docs/reference.md"
PART = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
NO_OPTIONS = "It has no settings."
NO_NUMBERS = "No stored result has it yet. `fedprompt compare RUN...` prints those of your own runs."
COLUMNS = {
    "vision": {
        "personal": "what is personal",
        "up": "what goes up",
        "prompts": "prompts",
        "head": "head by default",
    },
    "text": {"personal": "what is personal", "up": "what goes up", "learned": "what is learned"},
    "variants": {"rule": "rule", "refused": "refused with"},
}  # of the tables on the page of all methods: what a page says about itself, and the head of its column
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


def family(name: str, cls: Any) -> str:
    """The table on the page of all methods that has it."""
    if name in registry.variants():
        return "variants"
    return "text" if cls().uses_text else "vision"


def overview(said: Mapping[str, Mapping[str, str]], table: str) -> str:
    """A row for every method of a family, from what its page says about itself."""
    columns = COLUMNS[table]
    lines = [f"| {' | '.join(['variant' if table == 'variants' else 'method', *columns.values()])} |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for name, cells in said.items():
        lines.append(f"| {' | '.join([f'[`{name}`]({name}.md)', *(cells.get(key) or UNKNOWN for key in columns)])} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Every page of a method, the page of all, and what they should say."""
    results = load_all(ROOT / "benchmarks/accuracy")
    families = {name: family(name, cls) for name, cls in known().items()}
    said, made = {}, {}
    for name, cls in known().items():
        path = PAGES / f"{name}.md"
        text = path.read_text() if path.is_file() else new_page(name, cls, families[name])
        said[name] = front_matter(text)
        made[path] = renewed(text, {"options": options(cls), "numbers": numbers(results, name)})
    tables = {
        table: overview({name: cells for name, cells in in_order(said).items() if families[name] == table}, table)
        for table in COLUMNS
    }
    made[PAGES / "index.md"] = renewed((PAGES / "index.md").read_text(), tables)
    return made


def files() -> dict[Path, str]:
    """Everything that is generated, in whole or in part, and what it should say."""
    return {
        **pages(),
        SETTINGS: renewed(SETTINGS.read_text(), {"settings": settings_tables()}),
        SCHEMA: schema_text(tuple(known())),
        REFERENCE: reference_page(),
    }


@cache
def schema_text(names: tuple[str, ...]) -> str:
    """The schema with the methods and variants of these names; making it takes seconds."""
    methods, variants = (
        {name: cls for name, cls in table.items() if name in names}
        for table in (registry.methods(), registry.variants())
    )
    return as_text(config_schema(methods, variants))


def parts(path: Path) -> set[str]:
    """The generated parts that a file must have."""
    if path in (SCHEMA, REFERENCE):
        return set()
    if path == SETTINGS:
        return {"settings"}
    return set(COLUMNS) if path.name == "index.md" else {"options", "numbers"}


def stale() -> list[str]:
    """Names of files that are missing, lack a generated part or say something old."""
    found = []
    for path, text in files().items():
        whole = parts(path) == {part[1] for part in PART.finditer(text)}
        if not whole or not path.is_file() or path.read_text() != text:
            found.append(path.name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is stale")
    if parser.parse_args(arguments).check:
        old = stale()
        for name in old:
            print(f"{name} is missing or stale: run python docs/tools/generate.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in files().items():
        if not path.is_file() and path.parent == PAGES:
            print(
                f"docs/methods/{path.name} is new: write its idea, its equations and its paper, by the pattern of fedvpt.md"
            )
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
