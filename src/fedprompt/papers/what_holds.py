"""docs/what_holds.md: which orders of the papers hold in our runs, counted over all result files."""

from __future__ import annotations

from collections.abc import Sequence

from fedprompt.papers.result_file import Result
from fedprompt.papers.results_page import NOTHING, Table, Text, anchor, markdown_table, order_table, wrapped
from fedprompt.papers.row_order import KEPT, ORDERS, REVERSED, UNKNOWN, Ranked, counted, ranked

HEAD = """# What holds and what does not

<!-- Written by `fedprompt reproduce --what-holds` from the JSON files in benchmarks/accuracy: change those, not this page. -->
"""
ABOUT = (
    "Papers rank methods. Here every pair of rows that a paper ranks, and that we ran with the same kind of head, is compared "
    "in our own runs. The numbers themselves cannot be compared: other images, smaller backbones, fewer rounds."
)
RULE = """## How a pair is judged

| | |
| --- | --- |
| **kept** | the whole 95 % interval is on the paper's side of zero |
| **level** | the interval holds zero: our runs do not say |
| **reversed** | the whole interval is on the other side |
| **too few** | no interval: one seed, or two that agree to the last digit, and nothing is known of clients and images |"""
MEANING = (
    "*Ours* is the Average of the row that the paper has ahead less that of the other one, over the same seeds, in percentage "
    "points.",
    "Where run files say which images are answered correctly, the interval is a bootstrap over clients within seeds, or over "
    "images where clients are too few ([more](report.md#who-is-ahead)). Older result files have one Average per seed: then it is "
    "Student's interval over seeds, which with two seeds reaches 12.7 standard errors to either side, so most pairs are level.",
    "Pairs of one table are not independent, and of twenty that are truly equal one is called kept or reversed by chance. "
    '"Reversed" does not say that a paper is wrong: images, sizes and tuning differ, and the [discussion](discussion.md) names '
    "reasons where we know them.",
)


def page(results: Sequence[Result]) -> str:
    """All counts, then the pairs of every result that our runs can tell apart."""
    found = [(each, pairs) for each in results if (pairs := ranked(each))]
    parts = [HEAD + "\n" + ABOUT, summary(found), "## The counts", markdown_table(counts_table(found)), RULE, *MEANING]
    for result, pairs in found:
        decided = [each for each in pairs if each.order in (KEPT, REVERSED)]
        lines = [
            f"## {result.title}",
            f"[Its section in the results](results.md#{anchor(result.title)}) has the tables, the settings and the command.",
        ]
        body = markdown_table(order_table(decided)) if decided else "No pair is decided."
        parts += [*lines, body]
    return wrapped("\n\n".join(parts)) + "\n"


def summary(found: Sequence[tuple[Result, Sequence[Ranked]]]) -> str:
    """The counts over all results, in a sentence."""
    pairs = [each for _, some in found for each in some]
    counts = counted(pairs)
    decided = counts[KEPT] + counts[REVERSED]
    said = f"Of {len(pairs)} pairs in {len(found)} tables, **{counts[KEPT]} are kept, {len(pairs) - decided - counts[UNKNOWN]} level "
    said += f"and {counts[REVERSED]} reversed**"
    return said + (f"; of {counts[UNKNOWN]} we know too little." if counts[UNKNOWN] else ".")


def counts_table(found: Sequence[tuple[Result, Sequence[Ranked]]]) -> Table:
    lines = []
    for result, pairs in found:
        counts = counted(pairs)
        seeds = sorted({each.ours.seeds for each in pairs})
        over = " and ".join(dict.fromkeys(each.ours.drawn for each in pairs))
        shown = [str(counts[order]) if counts[order] else NOTHING for order in ORDERS]
        about = f"{'–'.join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))} seeds, over {over}"
        lines.append((Text(f"{result.paper}: {result.title}"), Text(str(len(pairs))), *map(Text, shown), Text(about)))
    return Table("", ("Table", "Pairs", *ORDERS, "Intervals"), tuple(lines))
