"""Whether a paper's order holds: pairs counted by hand, intervals against scipy, and the page that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedprompt.papers import what_holds
from fedprompt.papers.result_file import Pair, Result, load_all, parse
from fedprompt.papers.results_page import MOST_LEVEL, order_sentence, order_table, page
from fedprompt.papers.row_order import counted, ranked, sentence

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]

PAPER = {"A": 0.90, "B": 0.80, "C": 0.70, "D": 0.70, "E": 0.60}
OURS = {
    "A": [0.80, 0.81, 0.80],  # A over B kept, A over C level, A over E unknown (one seed)
    "B": [0.70, 0.70, 0.71],  # B over C reversed
    "C": [0.82, 0.80, 0.80],
    "D": [0.10, 0.10, 0.10],  # another kind of head: compared with nobody
    "E": [0.50],
}


def cell(row: str, averages: list[float], paper: float | None, column: str = "m = 1") -> dict[str, Any]:
    runs = [{"seed": seed, "status": "finished", "figures": {"average": value}} for seed, value in enumerate(averages)]
    ours = {"figures": {"average": {"mean": float(np.mean(averages))}}, "runs": runs, "seeds": list(range(len(runs)))}
    return {"row": row, "column": column, **ours, "paper": {"average": {"mean": paper}} if paper else {}}


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "format": "fedprompt-results-1",
        "name": "p/t",
        "experiment": "p-t",
        "title": "Table 1 of P",
        "kind": "reproduction",
        "paper": "P",
        "rows": [{"title": name, "group": "shared" if name == "D" else "local"} for name in OURS],
        "columns": [{"title": "m = 1"}],
        "cells": [cell(name, averages, PAPER[name]) for name, averages in OURS.items()],
        **changes,
    }
    return parse(values)


def by_names(found: Result) -> dict[str, str]:
    return {f"{each.first}{each.second}": each.order for each in ranked(found)}


def test_the_pairs_counted_by_hand() -> None:
    assert by_names(result()) == {
        "AB": "kept",
        "AC": "level",
        "AE": "too few",
        "BC": "reversed",
        "BE": "too few",
        "CE": "too few",
    }
    pairs = ranked(result())
    assert counted(pairs) == {"kept": 1, "level": 1, "reversed": 1, "too few": 3}
    assert sentence(pairs) == "6 pairs of rows that the paper ranks: 1 kept, 1 level, 1 reversed, 3 too few"


def test_the_interval_over_seeds_is_that_of_a_paired_t_test() -> None:
    found = next(each for each in ranked(result()) if (each.first, each.second) == ("A", "B"))
    expected = stats.ttest_rel(OURS["A"], OURS["B"]).confidence_interval(0.95)
    assert (found.ours.low, found.ours.high) == pytest.approx(tuple(expected), rel=1e-5)
    assert found.ours.difference == pytest.approx(0.1)
    assert found.paper == pytest.approx(0.1)
    assert found.ours.drawn == "seeds"


def test_only_seeds_of_both_are_paired() -> None:
    first, second = cell("A", [0.8, 0.9], 0.9), cell("B", [0.5, 0.1, 0.7], 0.8)
    first["runs"][1]["seed"] = 2
    (found,) = ranked(result(rows=[{"title": "A"}, {"title": "B"}], cells=[first, second]))
    assert (found.ours.seeds, found.ours.difference) == (2, pytest.approx((0.3 + 0.2) / 2))


def test_two_seeds_that_agree_to_the_last_digit_have_no_interval() -> None:
    cells = [cell("A", [0.8, 0.7], 0.9), cell("B", [0.5, 0.4], 0.8)]
    (found,) = ranked(result(rows=[{"title": "A"}, {"title": "B"}], cells=cells))
    assert found.order == "too few"


def test_a_stored_pair_counts_and_not_the_seeds_whichever_row_it_names_first() -> None:
    stored = {"column": "m = 1", "difference": -0.3, "low": -0.4, "high": -0.2, "drawn": "clients", "seeds": 3}
    same = result(pairs=[{**stored, "row": "A", "against": "B"}])
    assert by_names(same)["AB"] == "reversed"
    turned = result(pairs=[{**stored, "row": "B", "against": "A", "better": 1, "worse": 4}])
    found = next(each for each in ranked(turned) if (each.first, each.second) == ("A", "B"))
    assert found.order == "kept"
    expected = {"row": "A", "against": "B", "difference": 0.3, "low": 0.2, "high": 0.4, "better": 4, "worse": 1}
    assert found.ours == Pair(**{**stored, **expected})


def test_a_row_that_the_paper_does_not_have_is_compared_with_nobody() -> None:
    cells = [cell("A", [0.8, 0.7], 0.9), cell("B", [0.5, 0.4], None)]
    assert ranked(result(rows=[{"title": "A"}, {"title": "B"}], cells=cells)) == []


def test_a_table_lists_all_pairs_or_those_that_are_told_apart() -> None:
    pairs = ranked(result())
    assert [line[-1].text for line in order_table(pairs).lines] == ["kept", "too few", "reversed", "too few", "too few"]
    every = order_table(pairs, every=True)
    assert len(every.lines) == 6
    assert [text.text for text in every.lines[0][:4]] == ["m = 1", "A over B", "+10.00", "+10.00"]
    assert order_sentence(pairs).endswith("too few.")  # one level pair is listed
    many = [pairs[1]] * (MOST_LEVEL + 1)
    assert "not listed" in order_sentence(many)


def test_the_page_counts_over_all_tables_and_links_to_them() -> None:
    text = " ".join(
        what_holds.page([result(), result(title="Table 2 of P"), result(title="No paper", cells=[])]).split()
    )
    assert "Of 12 pairs in 2 tables, **2 are kept, 2 level and 2 reversed**; of 6 we know too little." in text
    assert "| P: Table 2 of P | 6 | 1 | 1 | 1 | 3 | 1–3 seeds, over seeds |" in text
    assert "(results.md#table-2-of-p)" in text
    assert "No paper" not in text


def test_the_page_of_results_has_the_counts_below_the_tables() -> None:
    text = page([result()])
    assert "6 pairs of rows that the paper ranks: 1 kept, 1 level, 1 reversed, 3 too few." in text
    assert "| m = 1 | B over C | +10.00 |" in text


def test_the_page_is_the_one_that_the_stored_results_give() -> None:
    written = (ROOT / "docs/what_holds.md").read_text(encoding="utf-8")
    expected = what_holds.page(load_all(ROOT / "benchmarks/accuracy"))
    assert written == expected, "run `make results` and commit docs/what_holds.md"
