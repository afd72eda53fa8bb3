"""One HTML file that holds a whole comparison: table, pictures and the settings of every run.

It loads nothing and runs no script, so it can be mailed, archived and opened anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fedprompt.assets import image_credit
from fedprompt.errors import RunError, broken
from fedprompt.io.files import write_atomically
from fedprompt.metrics.accuracy import mean_title
from fedprompt.report import comparison_table, html_elements, method_grid, paired_table
from fedprompt.report import latex_table as latex
from fedprompt.report.comparison_table import Row
from fedprompt.report.method_grid import PAIR, TITLES, Arrangement
from fedprompt.report.run_details import runs_section, settings_section
from fedprompt.report.tasks import Task, by_task
from fedprompt.runs.families import BUDGET, TASK, disagreements
from fedprompt.runs.run import Run

if TYPE_CHECKING:
    from fedprompt.report.sections import Part, Picture

FIGURES, TABLE = "figures", "table.tex"  # what `--figures` adds to the folder of a report


@dataclass(frozen=True)
class Written:
    """The files of a report."""

    html: Path
    png: Path
    figures: list[Path] = field(default_factory=list)
    """Every picture as PNG and SVG."""
    latex: Path | None = None


def write_report(
    runs: Sequence[Run],
    directory: Path,
    figures: bool = False,
    against: str | None = None,
    specificity: float | None = None,
    first: Sequence[Part] = (),
    **options: Any,
) -> Written:
    """Write `report.html` and `report.png` (the overview for a README); with `figures`, everything a paper needs as
    well; with `against`, paired differences from that row; with a specificity, the figures by class at that one, from
    test images and weights that `options` lead to as in `TrainedClient.open`. Parts that were made elsewhere come `first`.
    """
    from fedprompt.report import plots
    from fedprompt.report.class_tables import computed
    from fedprompt.report.sections import all_parts

    if not runs:
        raise RunError(broken("report", "be given at least one run", []))
    arranged = method_grid.arrange(runs)
    by_class = None if specificity is None else computed(runs, specificity, **options)
    parts = [*first, *all_parts(runs, arranged, by_class)]
    html, overview = directory / "report.html", directory / "report.png"
    # read everything first: a damaged run must not leave half a report
    content = rendered(runs, arranged, parts, against).encode()
    write_atomically(html, content)
    plots.save_overview(arranged, overview)
    if not figures:
        return Written(html, overview)
    write_atomically(directory / TABLE, latex.latex(runs, against).encode())
    pictures = [picture for part in parts for picture in (*part.pictures, *part.more)]
    names = distinct([picture.name for picture in pictures])
    both = zip(pictures, names, strict=True)
    paths = [path for picture, name in both for path in save_picture(picture, directory / FIGURES / name)]
    return Written(html, overview, paths, directory / TABLE)


def distinct(names: Sequence[str]) -> list[str]:
    """The names; repeated ones get a number: runs of several folders may have the same."""
    taken: dict[str, None] = {}  # in order
    for name in names:
        choices = chain([name], (f"{name}-{number}" for number in count(2)))
        taken[next(each for each in choices if each not in taken)] = None
    return list(taken)


def save_picture(picture: Picture, path: Path) -> list[Path]:
    """For papers: PNG at 300 dots per inch, and SVG, under a path without an ending."""
    from fedprompt.report.plot_style import png, svg_file

    files = {"png": png(picture.figure, 300), "svg": svg_file(picture.figure)}
    paths = [path.with_name(f"{path.name}.{ending}") for ending in files]
    for path, content in zip(paths, files.values(), strict=True):
        write_atomically(path, content)
    return paths


def render(runs: Sequence[Run], against: str | None = None) -> str:
    """The page as text."""
    from fedprompt.report.sections import all_parts

    arranged = method_grid.arrange(runs)
    return rendered(runs, arranged, all_parts(runs, arranged), against)


def rendered(runs: Sequence[Run], arranged: Arrangement, parts: Sequence[Part], against: str | None = None) -> str:
    tasks = by_task(runs, against)
    sections = {
        "Results": results_section(tasks, arranged),
        **({} if against is None else {f"Against {against}": differences_section(tasks, f"Against {against}")}),
        **{part.title: part_section(part, number) for number, part in enumerate(parts)},
        "Settings and versions": settings_section(runs),
        "Runs": runs_section(runs),
    }
    title = "Comparison of runs" if len(runs) > 1 else f"Run {runs[0].name}"
    contents = [(html_elements.slug(name), name) for name in sections]
    return html_elements.document(title, lead(runs, tasks), "\n".join(sections.values()), contents)


def lead(runs: Sequence[Run], tasks: Sequence[Task]) -> str:
    """What was compared, the best method if there is one comparison, and whose images they are."""
    winner = best(tasks[0].rows) if len(tasks) == 1 else ""
    several = "s" if len(runs) > 1 else ""
    listed = {
        f"{len(runs)} run{several} of": [run.config.label for run in runs],
        "on": [PurePath(run.config.data.source).name for run in runs],
        "with": [PurePath(run.config.backbone.name).name for run in runs],
        f"seed{'s' if len({run.config.seed for run in runs}) > 1 else ''}": [str(run.config.seed) for run in runs],
    }
    text = " ".join(f"{word} {', '.join(dict.fromkeys(names))}" for word, names in listed.items())
    text = text.replace(" seed", ", seed", 1)
    credits = dict.fromkeys(credit for run in runs if (credit := image_credit(run.config.data.source)))
    sentences = [f"{text}.", winner, *(f"Images: {credit}." for credit in credits)]
    return "\n".join(html_elements.paragraph(sentence) for sentence in sentences if sentence)


def best(rows: Sequence[Row]) -> str:
    """`Best Average: fedvpt, 61.20 ± 0.40.` Empty if the rows are not one comparison."""
    sentences = []
    for key in PAIR if fair(rows) else ():
        title = mean_title(TITLES[key], comparison_table.averaged(rows))
        level = comparison_table.close(rows, key)
        for numbers in comparison_table.ranked(rows, key):
            chosen = [rows[number] for number in numbers if number in comparison_table.winners(rows, key)]
            value = chosen[0].values[key] if len(chosen) == 1 else None
            if value is None:
                continue
            head = chosen[0].head.replace("_", " ")
            kind = f" with a {head} head" if len({row.head for row in rows}) > 1 and head else ""
            close = [rows[number].title for number in numbers if number in level]
            within = f"; within the spread: {', '.join(close)}" if close else ""
            sentences.append(f"Best {title}{kind}: {chosen[0].title}, {comparison_table.percent(value)}{within}.")
    return " ".join(sentences)


def fair(rows: Sequence[Row]) -> bool:
    """Whether the rows are one comparison: the same task and budget, no attacks and no privacy."""
    named = [(row.label, row.settings) for row in rows]
    comparable = not disagreements(named, (*TASK, *BUDGET))
    return comparable and not any(row.attacked or row.epsilon is not None for row in rows)


def results_section(tasks: Sequence[Task], arranged: Arrangement) -> str:
    explained = comparison_table.explanations([row for task in tasks for row in task.rows])
    full = [*map(task_table, tasks), *map(html_elements.paragraph, explained)]
    if not arranged.is_grid:
        return html_elements.section("Results", *full)
    return html_elements.section(
        "Results",
        html_elements.notes(method_grid.warnings(arranged)),
        grid_table(arranged),
        *(html_elements.paragraph(text) for text in method_grid.remarks(arranged)),
        html_elements.folded("All figures, a table for every task", "\n".join(full)),
    )


def task_table(task: Task) -> str:
    """All figures of one task, below a heading if there are several."""
    shown = comparison_table.columns(task.rows)
    notes = html_elements.notes(comparison_table.notes(task.rows))
    name, head = task.title or "All figures", comparison_table.header(shown)
    table = html_elements.table(name, head, comparison_table.cells(task.rows, shown))
    return html_elements.section(name, notes, table, level=3) if task.title else f"{notes}\n{table}"


def differences_section(tasks: Sequence[Task], title: str) -> str:
    """Paired differences, a table for every task; what all tables mean is said once."""
    meaning = paired_table.meaning(next((task.pairs[0].against for task in tasks if task.pairs), title))
    parts = []
    for task in tasks:
        name = task.title or title
        rows = paired_table.cells(task.pairs)
        table = html_elements.table(name, paired_table.HEAD, rows) if task.pairs else ""
        notes = html_elements.notes(paired_table.warnings(task))
        parts.append(html_elements.section(name, table, notes, level=3) if task.title else f"{table}\n{notes}")
    return html_elements.section(title, *parts, html_elements.paragraph(f"{meaning}."))


def grid_table(grid: Arrangement) -> str:
    """Methods by settings, as in papers."""
    groups = [(column.label, len(PAIR)) for column in grid.columns]
    head = ["Method", *(TITLES[key] for _ in grid.columns for key in PAIR)]
    return html_elements.table("Methods by settings", head, method_grid.grid_cells(grid), groups, "grid")


def part_section(part: Part, number: int) -> str:
    """Some pictures shown, further ones folded, and their numbers."""
    opened = [drawn(picture, f"p{number}-{place}") for place, picture in enumerate(part.pictures)]
    more = [drawn(picture, f"p{number}-{place}") for place, picture in enumerate(part.more, start=len(opened))]
    numbers = [html_elements.table(table.name, table.head, table.rows, kind=table.kind) for table in part.tables]
    titles = [
        html_elements.section(table.name, markup, level=3) for table, markup in zip(part.tables, numbers, strict=True)
    ]
    tables = "\n".join(titles if len(numbers) > 1 else numbers)
    return html_elements.section(
        part.title,
        *map(html_elements.paragraph, part.texts),
        html_elements.pictures(opened) if opened else "",
        html_elements.folded(f"{len(more)} more pictures", html_elements.pictures(more), "screen") if more else "",
        html_elements.folded("Numbers", tables) if numbers and not part.unfolded else tables,
        *[
            html_elements.folded(each.name, html_elements.table(each.name, each.head, each.rows))
            for each in part.details
        ],
        half=len(opened) < 2 and not part.unfolded and not any(table.kind for table in part.tables),
    )


def drawn(picture: Picture, prefix: str) -> str:
    from fedprompt.report.plot_style import svg

    return html_elements.picture(svg(picture.figure, prefix), picture.caption)
