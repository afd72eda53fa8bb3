"""Tables of result files: ours next to the paper's, for the terminal, for docs/results.md and for pages of methods.

    results = load_all("benchmarks/accuracy")
    page(results)                           # docs/results.md
    method_numbers(results, "pfedmoap")     # one method over all of them

Everything printed comes from the files. Does not import torch.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedprompt.io.safe_text import safe_line
from fedprompt.papers.result_file import (
    DIAGNOSTIC,
    DOMAIN,
    INFORMATION,
    Cell,
    Column,
    Figure,
    Result,
    file_of,
    load,
    load_all,
)
from fedprompt.papers.row_order import AVERAGE, LEVEL, REVERSED, Ranked, counted, ranked, sentence
from fedprompt.report.comparison_table import format_bytes
from fedprompt.report.paired_table import points
from fedprompt.report.table_formats import markdown_escape

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["load", "load_all", "markdown_table", "method_numbers", "page", "reproduction_notes", "rich_table", "tables"]

NOTHING = "–"
FOLDER = "benchmarks/accuracy"  # where the committed results are, seen from the root of the project
TITLES = {
    "average": "Average",
    "worst": "Worst Local",
    "ece": "ECE",
    "local": "Local",
    "base": "Base",
    "novel": "Novel",
    "hm": "HM",
}
CONTROLS = {
    f"{DIAGNOSTIC}instance.accuracy": "as they are",
    f"{DIAGNOSTIC}instance.accuracy_mean_prompt": "their mean over images",
    f"{DIAGNOSTIC}instance.accuracy_other_prompt": "those of another image",
    f"{DIAGNOSTIC}instance.attention": "attention of CLS to them",
}
PLAIN = ("server_auc", "insider_auc")  # figures that are no shares
SPREADS = ("spread",)  # in whole points
MOST_LEVEL = 10  # level pairs that a table of orders lists

HEAD = """# Results

<!-- Written by `fedprompt reproduce --page docs/results.md` from the JSON files in benchmarks/accuracy: change those, not this page. -->
"""
ABOUT = (
    "Numbers we measured, with the commands that made them. They are small on purpose: two CPU cores, minutes. Which orders of "
    "the papers they confirm: [what holds and what does not](what_holds.md). What they say, and where and why our order "
    "differs: [discussion](discussion.md). How to make them again: [reproduce](reproduce.md)."
)
READING = (
    "Accuracies in per cent, mean ± sample standard deviation over seeds, the best of ours in bold. "
    "*Average* is the mean over clients, *Worst Local* the client with the lowest accuracy. "
    "Two rows that a paper ranks are **kept**, **level** or **reversed** here: see [the rule](what_holds.md#how-a-pair-is-judged)."
)


@dataclass(frozen=True)
class Text:
    """The content of one cell of a table, before escaping."""

    text: str
    bold: bool = False
    rest: str = ""
    """After it, never bold."""


@dataclass(frozen=True)
class Table:
    """A table ready to be drawn."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[Text, ...], ...]


def figure_text(key: str, figure: Figure, digits: int = 1) -> str:
    """A figure as people read it: shares in per cent."""
    if key in PLAIN:
        return f"{figure.mean:.2f}"
    if key in SPREADS:
        return f"{100 * figure.mean:.0f}"
    mean = f"{100 * figure.mean:.{digits}f}"
    return mean if figure.std is None else f"{mean} ± {100 * figure.std:.{digits}f}"


def tables(result: Result) -> list[Table]:
    """The tables of a result: for a reproduction one for each figure, with ours and the paper's; else the one it
    describes.
    """
    if result.kind == "reproduction":
        keys = [key for key in ("average", "worst") if any(key in {**c.figures, **c.paper} for c in result.cells)]
        return [*(_beside(result, key) for key in keys), *_domains_beside(result), *_controls(result)]
    winners = {column.title: _winners(result, column) for column in result.columns}
    lines = [
        (Text(row.title), *(_own(result, row.title, column, winners[column.title]) for column in result.columns))
        for row in result.rows
    ]
    return [Table("", ("", *(column.title for column in result.columns)), tuple(lines))]


def _own(result: Result, row: str, column: Column, winners: set[str]) -> Text:
    cell = result.cell(row, column.cell or column.title)
    known = [
        figure_text(key, cell.figures[key], result.digits) for key in column.figures if cell and key in cell.figures
    ]
    return Text(known[0], row in winners, "".join(f" / {text}" for text in known[1:])) if known else Text(NOTHING)


def _beside(result: Result, key: str) -> Table:
    """One figure of a reproduction in every column: `ours ± std | paper`."""
    return _side_by_side(result, TITLES[key], [(column.title, column, key) for column in _shown(result)])


def _domains_beside(result: Result) -> list[Table]:
    """The figures of single domains, a table for each column, if the paper has them."""
    if not any(key.startswith(DOMAIN) for cell in result.cells for key in cell.paper):
        return []
    found = []
    for column in _shown(result):
        cells = [cell for cell in result.cells if cell.column == column.title]
        keys = dict.fromkeys(key for side in ("paper", "figures") for cell in cells for key in getattr(cell, side))
        places = [(key.removeprefix(DOMAIN), column, key) for key in keys if key.startswith(DOMAIN)]
        found += [_side_by_side(result, f"{column.title} by domain", places)] if places else []
    return found


def _controls(result: Result) -> list[Table]:
    """What instance prompts do: test accuracy if they are replaced, where runs have `method.diagnose`."""
    lines = []
    for cell in result.cells:
        found = [cell.figures.get(key) for key in CONTROLS]
        if any(found):
            texts = [Text(figure_text(AVERAGE, each)) if each else Text(NOTHING) for each in found]
            bits = cell.figures.get(INFORMATION)
            lines.append((Text(f"{cell.row}, {cell.column}"), *texts, Text(f"{bits.mean:.1e}" if bits else NOTHING)))
    header = ("", *CONTROLS.values(), "mutual information (nats)")
    return [Table("Accuracy with instance prompts replaced", header, tuple(lines))] if lines else []


def _shown(result: Result) -> list[Column]:
    """The columns that were run, or the paper's where none was."""
    ran = [c for c in result.columns if any(cell.column == c.title and cell.runs for cell in result.cells)]
    return ran or list(result.columns)


def _side_by_side(result: Result, what: str, places: Sequence[tuple[str, Column, str]]) -> Table:
    """Our figures and the paper's in cells given by their title, a column of the result and a figure."""
    published = any(
        key in cell.paper for _, column, key in places for cell in result.cells if cell.column == column.title
    )
    winners = [_winners(result, column, key) for _, column, key in places]
    lines = []
    for row in result.rows:
        cells = [(result.cell(row.title, column.title), key) for _, column, key in places]
        if any(cell and (cell.runs or key in cell.paper) for cell, key in cells):
            best = [row.title in each for each in winners]
            texts = [_pair(cell, key, won, published) for (cell, key), won in zip(cells, best, strict=True)]
            lines.append((Text(row.title), *texts))
    who = f"{what}, ours | {result.paper}" if published else f"{what}, ours"
    return Table(who, ("", *(title for title, _, _ in places)), tuple(lines))


def _pair(cell: Cell | None, key: str, best: bool, published: bool) -> Text:
    ours = theirs = NOTHING
    if cell is not None:
        failed = cell.runs and not cell.figures
        ours = figure_text(key, cell.figures[key]) if key in cell.figures else "failed" if failed else NOTHING
        theirs = figure_text(key, cell.paper[key], 2) if key in cell.paper else NOTHING
    return Text(ours, best, f" | {theirs}" if published else "")


def _winners(result: Result, column: Column, key: str | None = None) -> set[str]:
    """Titles of the rows with the largest mean as printed, inside each group; none if all are equal."""
    key = key or column.figures[0]
    groups: dict[str | None, dict[str, float]] = {}
    if (key in TITLES and key != "ece") or key.startswith(DOMAIN):
        for row in result.rows:
            cell = result.cell(row.title, column.cell or column.title)
            if cell and key in cell.figures:
                groups.setdefault(row.group, {})[row.title] = round(100 * cell.figures[key].mean, result.digits)
    rivals = [held for held in groups.values() if len(set(held.values())) > 1]
    return {title for held in rivals for title, mean in held.items() if mean == max(held.values())}


def order_table(pairs: Sequence[Ranked], every: bool = False) -> Table:
    """Differences in percentage points; without `every` only pairs that we can tell apart."""
    shown = [each for each in pairs if every or each.order != LEVEL]
    lines = []
    for each in shown:
        ours = each.ours
        interval = NOTHING if ours.low is None or ours.high is None else f"{points(ours.low)} to {points(ours.high)}"
        over = f"{ours.seeds} seeds" if ours.drawn == "seeds" else f"{ours.drawn}, {ours.seeds} seeds"
        texts = [each.column, f"{each.first} over {each.second}", points(each.paper), points(ours.difference), interval]
        lines.append((*map(Text, texts), Text(over), Text(each.order, bold=each.order == REVERSED)))
    header = ("Column", "In the paper", "Paper", "Ours", "95 % interval", "over", "Order")
    return Table("The paper's order in our runs", header, tuple(lines))


def order_sentence(pairs: Sequence[Ranked]) -> str:
    """The counts, and which pairs the table leaves out."""
    counts = counted(pairs)
    rest = (
        " Pairs that are level are not listed; their differences are in the file." if counts[LEVEL] > MOST_LEVEL else ""
    )
    return f"{sentence(pairs)}.{rest}"


def reproduction_notes(result: Result) -> list[str]:
    """Notes that a reader needs before comparing the two sides, one line each."""
    failed = [
        f"{cell.row}, {cell.column}, seed {run.seed} failed: {run.error}"
        for cell in result.cells
        for run in cell.runs or []
        if run.status == "failed"
    ]
    return [*result.notes, *result.differences, *failed]


def rich_table(table: Table) -> RichTable:
    """For the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    drawn = RichTable(
        title=RichText(safe_line(table.title)), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for position, title in enumerate(table.header):
        drawn.add_column(RichText(safe_line(title)), justify="right" if position else "left", overflow="fold")
    for line in table.lines:
        drawn.add_row(
            *(
                RichText.assemble((safe_line(each.text), "bold" if each.bold else ""), safe_line(each.rest))
                for each in line
            )
        )
    return drawn


def markdown_table(table: Table) -> str:
    """A GitHub table."""
    lines = [list(map(markdown_escape, table.header)), ["---"] * len(table.header)]
    for line in table.lines:
        lines.append([f"**{each.text}**" if each.bold else markdown_escape(each.text) for each in line])
        lines[-1] = [text + markdown_escape(each.rest) for text, each in zip(lines[-1], line, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(results: Sequence[Result]) -> str:
    """docs/results.md: all results, each with what made it."""
    parts = [HEAD + "\n" + ABOUT, READING]
    of_papers = [each for each in results if is_of_a_paper(each)]
    if of_papers:
        parts.append("## Tables of papers, in small\nOurs is left of the bar, the paper's right of it.")
    for result in of_papers:
        parts.append("\n\n".join([f"### {result.title}", *_body(result)]))
    for result in results:
        if not is_of_a_paper(result):
            parts.append("\n\n".join([f"## {result.title}", *_body(result)]))
    return wrapped("\n\n".join(parts)) + "\n"


def is_of_a_paper(result: Result) -> bool:
    """Whether a table is a paper's, such as `pfedbayespt/table1`, and not the grid of a config of ours."""
    return result.kind == "reproduction" and "/" in result.name


def wrapped(markdown: str, width: int = 120) -> str:
    """The same page with its prose in lines of at most `width` characters; tables, code, pictures and comments stay."""
    lines, code = [], False
    for line in markdown.split("\n"):
        code ^= line.startswith("```")
        if code or len(line) <= width or line.startswith(("|", "#", "!", "<", "```")):
            lines.append(line)
            continue
        indent = re.match(r"(?:- )?\s*", line)
        hanging = " " * len(indent[0]) if indent else ""
        lines += textwrap.wrap(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _body(result: Result) -> list[str]:
    blocks = list(result.about)
    for table in tables(result):
        blocks.append(
            "\n\n".join([*([f"*{markdown_escape(table.title)}*"] if table.title else []), markdown_table(table)])
        )
    pairs = ranked(result)
    if pairs:
        blocks.append(order_sentence(pairs))
        table = order_table(pairs, every=counted(pairs)[LEVEL] <= MOST_LEVEL)
        blocks += [markdown_table(table)] if table.lines else []
    notes = reproduction_notes(result)
    if notes:
        blocks.append("\n".join(f"- {markdown_note(note)}" for note in notes))
    blocks += [f"![{about}]({path})" for path, about in result.pictures]
    if result.commands:
        blocks.append("```\n" + "\n".join(result.commands) + "\n```")
    return [*blocks, provenance(result)]


def markdown_note(text: str) -> str:
    """A note with its code in backticks kept as code; all other marks are escaped."""
    parts = re.split(r"(`[^`]+`)", safe_line(text))
    return "".join(part if number % 2 else markdown_escape(part) for number, part in enumerate(parts))


def provenance(result: Result) -> str:
    """When, with what and on what a result was made; what was not recorded is shown as unknown."""
    versions = [
        ", ".join(f"{name} {each[name]}" for name in ("fedprompt", "torch", "python") if name in each)
        for each in result.versions or []
    ]
    data = [f"{each.source} (sha256 {(each.sha256 or each.fingerprint)[:12]}…)" for each in result.data or []]
    known = {
        "date": result.date,
        "versions": "; ".join(dict.fromkeys(versions)) or None,
        "hardware": hardware_text(result.hardware) if result.hardware else None,
        "data": ", ".join(data) or None,
        "backbone": ", ".join(f"{each.name} ({each.digest[:12]}…)" for each in result.backbones or []) or None,
        "single seeds": "in the file" if any(cell.runs for cell in result.cells) else None,
    }
    facts = [f"{name}: {markdown_escape(value)}" for name, value in known.items() if value]
    missing = [name for name, value in known.items() if not value]
    unknown = [f"not recorded: {', '.join(missing)}"] if missing else []
    file = f"[{file_of(result)}](../{FOLDER}/{file_of(result)})"
    return f"{file} · " + " · ".join([*facts, *unknown])


def hardware_text(hardware: dict[str, object]) -> str:
    memory = hardware.get("memory_bytes")
    parts = [
        str(hardware.get("cpu") or "unknown processor"),
        f"{hardware['cores']} cores" if hardware.get("cores") else "",
        format_bytes(memory) if isinstance(memory, int | float) else "",
        f"{hardware['threads']} threads" if hardware.get("threads") else "",
    ]
    return ", ".join(part for part in parts if part)


def method_numbers(results: Sequence[Result], method: str, page: str = "results.md") -> str:
    """The numbers of one method in all stored results, as a markdown table; empty if it has none.

    `method` is its name in configs (`pfedbayespt_d` is another one than `pfedbayespt`). There is a line for every row
    and setting: Average and Worst Local, mean ± standard deviation over seeds, and the paper's numbers (Average / Worst
    Local) where there are some. `page` is the path from the page with this table to docs/results.md, for links. Only
    accuracies of the usual test are listed: other figures (novel classes, leaks) are on the page of results.
    """
    lines = []
    for result in results:
        for row in result.rows:
            for column in result.columns if row.method == method else []:
                cell = result.cell(row.title, column.cell or column.title)
                if cell is None or "average" not in column.figures or "average" not in cell.figures:
                    continue
                ours = [
                    figure_text(key, cell.figures[key]) if key in cell.figures else NOTHING
                    for key in ("average", "worst")
                ]
                theirs = " / ".join(
                    figure_text(key, cell.paper[key], 2) for key in ("average", "worst") if key in cell.paper
                )
                link = f"[{markdown_escape(short_title(result))}]({page}#{anchor(result.title)})"
                setting = markdown_escape(f"{column.title}: {row.title}")
                lines.append(f"| {link} | {setting} | {ours[0]} | {ours[1]} | {theirs or NOTHING} |")
    if not lines:
        return ""
    return "\n".join(["| experiment | setting | Average | Worst Local | paper |", "|---|---|---|---|---|", *lines])


def short_title(result: Result) -> str:
    return result.title.partition(":")[0]


def anchor(title: str) -> str:
    """The name a heading has in links, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
