"""Does a paper's order of methods hold in our runs? Each pair of rows that the paper ranks, with the size of our difference.

A pair is **kept** if the 95 % interval of our difference is on the paper's side of zero, **reversed** if it is on the other
side, and **level** if it holds zero. Rows with another kind of head are not compared: the head decides more than the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from fedprompt.metrics.significance import Interval, mean_interval
from fedprompt.papers.result_file import Cell, Pair, Result

KEPT, LEVEL, REVERSED, UNKNOWN = "kept", "level", "reversed", "too few"
ORDERS = (KEPT, LEVEL, REVERSED, UNKNOWN)
AVERAGE = "average"
SAME = 1e-9  # two seeds that differ by less say nothing about their spread


@dataclass(frozen=True)
class Ranked:
    """Two rows of one column; the paper has the first one ahead."""

    column: str
    first: str
    second: str
    paper: float
    """By how much the first is ahead in the paper."""
    ours: Pair
    """The first less the second."""

    @property
    def order(self) -> str:
        if self.ours.low is None or self.ours.high is None:
            return UNKNOWN
        return KEPT if self.ours.low > 0 else REVERSED if self.ours.high < 0 else LEVEL


def ranked(result: Result) -> list[Ranked]:
    """Every pair of rows that the paper ranks and that we ran, in each column; equal numbers of the paper are no order."""
    found = []
    for column in result.columns:
        rows = [(row, result.cell(row.title, column.title)) for row in result.rows]
        here = [(row, cell) for row, cell in rows if cell and cell.figures.get(AVERAGE) and cell.paper.get(AVERAGE)]
        for (one, first), (other, second) in combinations(here, 2):
            ahead = first.paper[AVERAGE].mean - second.paper[AVERAGE].mean
            if one.group != other.group or not ahead:
                continue
            better, worse = (first, second) if ahead > 0 else (second, first)
            pair = stored(result, better, worse) or over_seeds(better, worse)
            if pair is not None:
                found.append(Ranked(column.title, better.row, worse.row, abs(ahead), pair))
    return found


def stored(result: Result, first: Cell, second: Cell) -> Pair | None:
    """What the file says of a pair, whichever of both it names first."""
    for pair in result.pairs:
        if pair.column == first.column and {pair.row, pair.against} == {first.row, second.row}:
            return pair if pair.row == first.row else turned(pair)
    return None


def turned(pair: Pair) -> Pair:
    low, high = (None if each is None else -each for each in (pair.high, pair.low))
    changes = {"row": pair.against, "against": pair.row, "difference": -pair.difference, "low": low, "high": high}
    return pair.model_copy(update={**changes, "better": pair.worse, "worse": pair.better})


def over_seeds(first: Cell, second: Cell) -> Pair | None:
    """From the Averages of single seeds, for files that say nothing of clients and images; None without a common seed."""
    one, other = (_averages(cell) for cell in (first, second))
    differences = [one[seed] - other[seed] for seed in one if seed in other]
    if not differences:
        return None
    interval: Interval | None = mean_interval(differences)
    if interval is not None and interval.high - interval.low < SAME:  # by the grid of so few images, not by precision
        interval = None
    return Pair(
        column=first.column,
        row=first.row,
        against=second.row,
        difference=sum(differences) / len(differences),
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        drawn="seeds",
        seeds=len(differences),
    )


def _averages(cell: Cell) -> dict[int, float]:
    runs = cell.runs or []
    return {run.seed: run.figures[AVERAGE] for run in runs if run.status == "finished" and AVERAGE in run.figures}


def counted(pairs: Sequence[Ranked]) -> dict[str, int]:
    """How many pairs are kept, level, reversed and undecided."""
    return {order: sum(pair.order == order for pair in pairs) for order in ORDERS}


def sentence(pairs: Sequence[Ranked]) -> str:
    """The counts in words."""
    counts = counted(pairs)
    parts = [f"{number} {order}" for order, number in counts.items() if number or order != UNKNOWN]
    return f"{len(pairs)} pair{'s' * (len(pairs) != 1)} of rows that the paper ranks: {', '.join(parts)}"
