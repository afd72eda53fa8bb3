"""Figures beside accuracy for the report: balanced accuracy, macro-F1, AUROC and sensitivity, by method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedprompt.report.comparison_table import NOTHING, Cell, percent, spread
from fedprompt.report.method_grid import Arrangement, Column
from fedprompt.report.sections import Part, Table
from fedprompt.runs.families import Family

if TYPE_CHECKING:
    from pandas import DataFrame

TITLE = "Beside accuracy"
HEAD = ["Method", "Accuracy", "Balanced accuracy", "Lowest of a client", "Macro-F1", "AUROC", "Sensitivity"]
POOLED = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "sensitivity")
MEANING = (
    "Test images of all clients together, in per cent, predicted again by each client's model after the last round; mean ± "
    "standard deviation over seeds. Balanced accuracy: mean over classes of the share that is recognised; its lowest value "
    "of a client is beside it. AUROC and sensitivity: one class against the rest, mean over classes; sensitivity at a "
    "specificity of at least {specificity:.0%}, at a threshold chosen on the same images."
)


def metrics_part(arranged: Arrangement, specificity: float, **options: Any) -> Part:
    """One table for each task; reads the test images of every run. For the options see `TrainedClient.open`."""
    tables = [_table(column, specificity, options) for column in arranged.columns]
    return Part(TITLE, [MEANING.format(specificity=specificity)], tables=tables, unfolded=True)


def _table(column: Column, specificity: float, options: dict[str, Any]) -> Table:
    name = f"{column.label}: {TITLE}" if column.label else TITLE
    return Table(name, HEAD, [_row(family, specificity, options) for family in column.families.values()])


def _row(family: Family, specificity: float, options: dict[str, Any]) -> list[Cell]:
    frames = [run.metrics(specificity, **options) for run in family.runs]
    pooled = {key: [float(frame.loc[("all", "pooled"), key]) for frame in frames] for key in POOLED}
    lowest = [_lowest(frame) for frame in frames]
    accuracy, balanced, *rest = (_cell(values) for values in pooled.values())
    return [Cell(family.title), accuracy, balanced, _cell(lowest), *rest]


def _lowest(frame: DataFrame) -> float:
    return float(frame.loc["client"]["balanced_accuracy"].min())


def _cell(values: Sequence[float]) -> Cell:
    value = spread(None if math.isnan(each) else each for each in values)
    return Cell(NOTHING if value is None else percent(value))
