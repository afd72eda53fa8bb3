"""Paired differences as the cells and sentences of a table, the same on a terminal, in Markdown and on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedprompt.io.safe_text import safe_line
from fedprompt.metrics.significance import DRAWS
from fedprompt.report.comparison_table import NOTHING, Cell
from fedprompt.report.paired_differences import UNDECIDED, Paired
from fedprompt.report.tasks import Task

# what matters most first: a phone shows three or four columns
HEAD = ["Method", "Verdict", "Difference", "95 % interval", "Images better / worse", "Seeds better", "p"]


def cells(pairs: Sequence[Paired]) -> list[list[Cell]]:
    table = []
    for each in pairs:
        interval = NOTHING if each.interval is None else f"{points(each.interval.low)} to {points(each.interval.high)}"
        images = NOTHING if each.gained is None else f"{each.gained} / {each.lost}"
        sure = each.verdict in ("ahead", "behind")
        texts = [f"{each.ahead} of {each.seeds}", f"{each.p:.2g}"]
        line = [Cell(safe_line(each.label)), Cell(each.verdict, sure), Cell(points(each.estimate)), Cell(interval)]
        table.append([*line, Cell(images), *map(Cell, texts)])
    return table


def points(value: float) -> str:
    """A difference of accuracies in percentage points, with its sign."""
    text = f"{100 * value:+.2f}"
    return "0.00" if float(text) == 0 else text


def notes(task: Task) -> list[str]:
    """What the table means, and for which rows it means less."""
    return [*([meaning(task.pairs[0].against)] if task.pairs else []), *warnings(task)]


def meaning(base: str) -> str:
    return safe_line(
        f"Average less that of {base}, over the same seeds, clients and images, in percentage points. The interval is a "
        f"bootstrap over clients within seeds ({DRAWS:,} draws). ahead: all of it is above 0; behind: all of it is below 0; "
        "level: it holds 0. It tells how far other clients of this kind could move the difference; p, of the exact "
        "sign test, whether seeds agree. Of twenty methods that are level, one is called ahead or behind by chance"
    )


def warnings(task: Task) -> list[str]:
    """For which rows the table means less."""
    if not task.pairs:
        where = f" in {task.title}" if task.title else ""
        why = f"{task.against} has no row there, or shares no seed and client with the others"
        return [safe_line(f"Nothing to compare{where}: {why}")]
    base = task.pairs[0].against

    def named(condition: Callable[[Paired], object]) -> list[str]:
        return [each.label for each in task.pairs if condition(each)]

    missing = [row.title for row in task.rows if row.title not in {base, *(each.label for each in task.pairs)}]
    lines = [
        (
            "Too few clients for an interval over clients, so images of the same clients are drawn: nothing is said of "
            "other clients",
            named(lambda each: each.drawn == "images"),
        ),
        (
            "Paired by client and not by image, because a run file does not say which images are right",
            named(lambda each: each.gained is None),
        ),
        (f"{UNDECIDED} clients and images for an interval", named(lambda each: each.interval is None)),
        ("Clients that only one of the two has are left out", named(lambda each: each.left_out)),
        ("Not paired, no seed with the same clients", missing),
    ]
    everyone = [each.label for each in task.pairs]
    who = [(title, "all rows" if names == everyone else ", ".join(names)) for title, names in lines if names]
    return [safe_line(f"{title}: {names}") for title, names in who]


def plain(task: Task, label: str) -> dict[str, Any] | None:
    """One row at full precision, for JSON."""
    found = next((each for each in task.pairs if each.label == label), None)
    if found is None:
        return None
    return {
        "row": found.against,
        "difference": found.estimate,
        "low": None if found.interval is None else found.interval.low,
        "high": None if found.interval is None else found.interval.high,
        "drawn": found.drawn,
        "verdict": found.verdict,
        "clients": found.clients,
        "images_better": found.gained,
        "images_worse": found.lost,
        "seeds": found.seeds,
        "seeds_better": found.ahead,
        "seeds_worse": found.behind,
        "p": found.p,
    }
