"""One HTML file that holds a whole comparison: table, pictures and the settings of every run.

It loads nothing and runs no script, so it can be mailed, archived and opened anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from fedprompt.assets import write_atomically
from fedprompt.errors import RunError, broken
from fedprompt.report import grid as grids
from fedprompt.report import latex, page, tables
from fedprompt.report.grid import PAIR, TITLES, Arrangement
from fedprompt.report.run_details import runs_section, settings_section
from fedprompt.report.tables import Row
from fedprompt.run import Run

if TYPE_CHECKING:
    from fedprompt.report.parts import Part, Picture

FIGURES, TABLE = "figures", "table.tex"  #: what `--figures` adds to the folder of a report


@dataclass(frozen=True)
class Written:
    """The files of a report."""

    html: Path
    png: Path
    figures: list[Path] = field(default_factory=list)  #: every picture as PNG and SVG
    latex: Path | None = None


def write_report(runs: Sequence[Run], directory: Path, figures: bool = False) -> Written:
    """Write `report.html` and `report.png` (the overview for a README); with `figures`, everything a paper needs as well."""
    from fedprompt.report import plots
    from fedprompt.report.parts import all_parts

    if not runs:
        raise RunError(broken("report", "be given at least one run", []))
    arranged = grids.arrange(runs)
    parts = all_parts(runs, arranged)
    html, overview = directory / "report.html", directory / "report.png"
    content = rendered(runs, arranged, parts).encode()  # all of it first: a damaged run leaves no half of a report
    write_atomically(html, content)
    plots.save_overview(arranged, overview)
    if not figures:
        return Written(html, overview)
    write_atomically(directory / TABLE, latex.latex(runs).encode())
    pictures = [picture for part in parts for picture in (*part.pictures, *part.more)]
    names = distinct([picture.name for picture in pictures])
    both = zip(pictures, names, strict=True)
    paths = [path for picture, name in both for path in save_picture(picture, directory / FIGURES / name)]
    return Written(html, overview, paths, directory / TABLE)


def distinct(names: Sequence[str]) -> list[str]:
    """The names, and where one comes again, with a number behind it: runs of several folders may have the same."""
    taken: dict[str, None] = {}  # in order
    for name in names:
        choices = chain([name], (f"{name}-{number}" for number in count(2)))
        taken[next(each for each in choices if each not in taken)] = None
    return list(taken)


def save_picture(picture: Picture, path: Path) -> list[Path]:
    """For papers: PNG at 300 dots per inch, and SVG, under a path without an ending."""
    from fedprompt.report.style import png, svg_file

    files = {"png": png(picture.figure, 300), "svg": svg_file(picture.figure)}
    paths = [path.with_name(f"{path.name}.{ending}") for ending in files]
    for path, content in zip(paths, files.values(), strict=True):
        write_atomically(path, content)
    return paths


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    from fedprompt.report.parts import all_parts

    arranged = grids.arrange(runs)
    return rendered(runs, arranged, all_parts(runs, arranged))


def rendered(runs: Sequence[Run], arranged: Arrangement, parts: Sequence[Part]) -> str:
    rows = tables.comparison(runs)
    sections = {
        "Results": results_section(rows, arranged),
        **{part.title: part_section(part, number) for number, part in enumerate(parts)},
        "Settings and versions": settings_section(runs),
        "Runs": runs_section(runs),
    }
    title = "Comparison of runs" if len(runs) > 1 else f"Run {runs[0].name}"
    contents = [(page.slug(name), name) for name in sections]
    return page.document(title, lead(runs, rows), "\n".join(sections.values()), contents)


def lead(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """What was compared, and who came out best where there is one answer to that."""
    several = "s" if len(runs) > 1 else ""
    listed = {
        f"{len(runs)} run{several} of": [run.config.label for run in runs],
        "on": [PurePath(run.config.data.source).name for run in runs],
        "with": [PurePath(run.config.backbone.name).name for run in runs],
        f"seed{'s' if len({run.config.seed for run in runs}) > 1 else ''}": [str(run.config.seed) for run in runs],
    }
    text = " ".join(f"{word} {', '.join(dict.fromkeys(names))}" for word, names in listed.items())
    return "\n".join([page.paragraph(f"{text}."), *([page.paragraph(best(rows))] if best(rows) else [])])


def best(rows: Sequence[Row]) -> str:
    """`Best Average: fedvpt, 61.20 ± 0.40.` Nothing where the rows are no one comparison."""
    told = []
    for key in PAIR:
        chosen = [rows[number] for number in sorted(tables.winners(rows, key))]
        value = chosen[0].values[key] if len(chosen) == 1 and fair(rows) else None
        if value is not None:
            told.append(f"Best {TITLES[key]}: {chosen[0].title}, {tables.percent(value)}.")
    return " ".join(told)


def fair(rows: Sequence[Row]) -> bool:
    """Whether the rows are one comparison: the same task and budget, nobody attacked or private."""
    named = [(row.label, row.settings) for row in rows]
    alike = not tables.disagreements(named, (*tables.TASK, *tables.BUDGET))
    return alike and not any(row.attacked or row.epsilon is not None for row in rows)


def results_section(rows: Sequence[Row], arranged: Arrangement) -> str:
    shown = tables.columns(rows)
    full = [
        page.table("All figures", tables.header(shown), tables.cells(rows, shown)),
        *(page.paragraph(text) for text in tables.explanations(rows)),
    ]
    notes = page.notes(tables.notes(rows))
    if not arranged.is_grid:
        return page.section("Results", notes, *full)
    return page.section(
        "Results",
        page.notes(grids.warnings(arranged)),
        grid_table(arranged),
        *(page.paragraph(text) for text in grids.remarks(arranged)),
        page.folded("All figures, one row for every method and setting", "\n".join([notes, *full])),
    )


def grid_table(grid: Arrangement) -> str:
    """Methods by settings, as in papers."""
    groups = [(column.label, len(PAIR)) for column in grid.columns]
    head = ["Method", *(TITLES[key] for _ in grid.columns for key in PAIR)]
    return page.table("Methods by settings", head, grids.grid_cells(grid), groups, "grid")


def part_section(part: Part, number: int) -> str:
    """Pictures in the open, further ones folded, and the numbers behind them."""
    opened = [drawn(picture, f"p{number}-{place}") for place, picture in enumerate(part.pictures)]
    more = [drawn(picture, f"p{number}-{place}") for place, picture in enumerate(part.more, start=len(opened))]
    numbers = [page.table(table.name, table.head, table.rows, kind=table.kind) for table in part.tables]
    titles = [page.section(table.name, markup, level=3) for table, markup in zip(part.tables, numbers, strict=True)]
    return page.section(
        part.title,
        *map(page.paragraph, part.texts),
        page.pictures(opened) if opened else "",
        page.folded(f"{len(more)} more pictures", page.pictures(more), "screen") if more else "",
        page.folded("Numbers", "\n".join(titles if len(numbers) > 1 else numbers)) if numbers else "",
        half=len(opened) < 2 and not any(table.kind for table in part.tables),
    )


def drawn(picture: Picture, prefix: str) -> str:
    from fedprompt.report.style import svg

    return page.picture(svg(picture.figure, prefix), picture.caption)
