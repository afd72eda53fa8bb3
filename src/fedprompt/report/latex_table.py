"""The comparison as a LaTeX table (booktabs), ready for a paper. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence

from fedprompt.report import comparison_table, method_grid, paired_table
from fedprompt.report.comparison_table import Cell, Row
from fedprompt.report.method_grid import PAIR, TITLES, Arrangement
from fedprompt.report.tasks import Task, by_task
from fedprompt.runs.run import Run

SPECIAL = {
    "≤": r"$\leq$",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "λ": r"$\lambda$",
    "ε": r"$\varepsilon$",
    "μ": r"$\mu$",
    "±": r"$\pm$",
    "≈": r"$\approx$",
    "–": "--",
    "…": r"\dots{}",
    "†": r"$^\dagger$",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}


def latex(runs: Sequence[Run], against: str | None = None) -> str:
    """Methods by settings if the runs form a grid, else a table for every task; then those of paired differences."""
    arranged = method_grid.arrange(runs)
    tasks = by_task(runs, against)
    tables = [grid_table(arranged)] if arranged.is_grid else [flat_table(task.rows, task.title) for task in tasks]
    return "\n".join([*tables, *(paired_differences(task) for task in tasks if task.pairs)])


def flat_table(rows: Sequence[Row], title: str = "") -> str:
    shown = [column for column in comparison_table.columns(rows) if column.narrow]
    head = " & ".join(escaped(name) for name in comparison_table.header(shown))
    layout = "l" + "r" * (len(shown) + 2)
    caption = [title, _FLAT] if title else [_FLAT]
    return _table(layout, [head], comparison_table.cells(rows, shown), caption, notes=comparison_table.notes(rows))


def paired_differences(task: Task) -> str:
    head = " & ".join(escaped(name) for name in paired_table.HEAD)
    first, *rest = paired_table.notes(task)
    caption = [task.title, first] if task.title else [first]
    layout = "l" + "r" * (len(paired_table.HEAD) - 1)
    return _table(layout, [head], paired_table.cells(task.pairs), caption, notes=rest)


_FLAT = (
    "Accuracies and ECE in per cent, mean ± sample standard deviation over seeds; Up and Down are bytes per client and "
    "round."
)


def grid_table(grid: Arrangement) -> str:
    """Average and Worst Local of every setting side by side."""
    width = len(PAIR)
    spans = [rf"\multicolumn{{{width}}}{{c}}{{{escaped(column.label)}}}" for column in grid.columns]
    starts = [2 + width * number for number in range(len(spans))]
    rules = " ".join(rf"\cmidrule(lr){{{start}-{start + width - 1}}}" for start in starts)
    head = [
        " & ".join(["", *spans]),
        " & ".join(["Method", *(escaped(TITLES[key]) for _ in spans for key in PAIR)]),
    ]
    layout = "l" + "r" * (width * len(spans))
    return _table(
        layout, head, method_grid.grid_cells(grid), method_grid.remarks(grid), rules, method_grid.warnings(grid)
    )


def _table(
    layout: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    caption: Sequence[str],
    between: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Notes that a reader needs before comparing rows, as comments above the table: the author decides what to print."""
    first, *rest = head
    lines = [
        r"% needs \usepackage{booktabs}; made by fedprompt",
        *(f"% {escaped(note)}" for note in notes),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{' '.join(_sentence(text) for text in caption)}}}",
        r"\label{tab:fedprompt}",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        rf"{first} \\",
        *([between] if between else []),
        *(rf"{line} \\" for line in rest),
        r"\midrule",
        *(rf"{' & '.join(map(_cell, row))} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _cell(cell: Cell) -> str:
    text = escaped(cell.text)
    # a row that begins with a bracket would be read as an argument of the line break before it
    text = f"{{}}{text}" if text.startswith(("[", "*")) else text
    return rf"\textbf{{{text}}}" if cell.bold else text


def _sentence(text: str) -> str:
    return escaped(text if text.endswith(".") else f"{text}.")


def escaped(text: str) -> str:
    """Plain text as LaTeX prints it: one line, no commands; control characters become spaces."""
    return " ".join("".join(SPECIAL.get(mark, mark if mark.isprintable() else " ") for mark in text).split())
