"""What runs look like in a notebook: one run as a table and a curve, several as a data frame or a picture."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from fedprompt.report import html_elements as html
from fedprompt.report.comparison_table import Cell, all_columns, cells, columns, comparison, header, notes
from fedprompt.report.plot_style import svg_file
from fedprompt.report.plots import learning_curves
from fedprompt.runs.frames import require_pandas
from fedprompt.runs.run import Run

if TYPE_CHECKING:
    from pandas import DataFrame


def compare(runs: Iterable[str | Path | Run]) -> DataFrame:
    """One row per method and setting, as `fedprompt compare` prints it: means over seeds, and standard deviations as `NAME_std`.

    Accuracies are fractions. What a reader needs before comparing the rows is in `frame.attrs["notes"]`.
    """
    pandas, rows = require_pandas(), comparison(_opened(runs))
    table = []
    for row in rows:
        line: dict[str, object] = {"method": row.title, "seeds": len(row.seeds), "rounds": row.rounds}
        for column in all_columns(rows):
            found = row.values.get(column.key)
            line[column.key] = found.mean if found else math.nan
            line[f"{column.key}_std"] = found.std if found and found.std is not None else math.nan
        table.append(line)
    frame: DataFrame = pandas.DataFrame(table or None, columns=None if table else ["method"])
    frame = frame.set_index("method")
    frame.attrs["notes"] = notes(rows)
    return frame


def plot(runs: Iterable[str | Path | Run]) -> Figure:
    """Average and Worst Local by round; runs that differ only in their seed are one line with its spread.

    A notebook shows the picture; `picture.savefig("curves.svg")` keeps it.
    """
    return learning_curves(_opened(runs))


def _opened(runs: Iterable[str | Path | Run]) -> list[Run]:
    runs = [runs] if isinstance(runs, str | Path | Run) else runs
    return [run if isinstance(run, Run) else Run(run) for run in runs]


def run_html(run: Run) -> str:
    """The table and the curve of a run. It has no script, and all text of the run is escaped."""
    rows = comparison([run])
    shown = columns(rows)
    pairs = zip(header(shown), cells(rows, shown)[0], strict=True)
    lines = [[Cell(title), cell] for title, cell in pairs]
    state = "finished" if run.finished else f"{rows[0].rounds} of {rows[0].of} rounds"
    parts = [f"<p><strong>{html.escape(run.name)}</strong>: {html.escape(state)}</p>", _table(lines)]
    if run.history():
        drawing = base64.b64encode(svg_file(learning_curves([run]))).decode()
        parts.append(f'<img alt="Average and Worst Local by round" src="data:image/svg+xml;base64,{drawing}">')
    return "\n".join([*parts, html.notes(notes(rows))])


def _table(lines: Iterable[list[Cell]]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name.text)}</th><td>{html.escape(cell.text)}</td></tr>" for name, cell in lines
    )
    return f"<table><tbody>{rows}</tbody></table><p>Accuracies, Client std and ECE in per cent.</p>"
