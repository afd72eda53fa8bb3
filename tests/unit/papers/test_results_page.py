"""Result files are read strictly, and everything shown comes from them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedprompt.errors import RunError
from fedprompt.papers.result_file import load, load_all, parse, save
from fedprompt.papers.results_page import (
    anchor,
    markdown_table,
    method_numbers,
    page,
    reproduction_notes,
    rich_table,
    tables,
    wrapped,
)

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
RUN = {"seed": 0, "status": "finished", "figures": {"average": 0.5}}
BROKEN = {"seed": 1, "status": "failed", "error": "DivergenceError: nan"}


def cell(row: str, column: str, mean: float | None = None, paper: float | None = None, **more: Any) -> dict[str, Any]:
    ours = {} if mean is None else {"figures": {"average": {"mean": mean, "std": 0.01}}, "seeds": [0], "runs": [RUN]}
    return {"row": row, "column": column, **ours, "paper": {"average": {"mean": paper}} if paper else {}, **more}


def result(**changes: Any) -> Any:
    values = {
        "format": "fedprompt-results-1",
        "name": "p/t",
        "experiment": "p-t",
        "title": "Table 1 of P, on digits",
        "kind": "reproduction",
        "paper": "P",
        "rows": [{"title": "A", "method": "fedvpt"}, {"title": "B", "method": "local"}],
        "columns": [{"title": "m = 1"}, {"title": "m = 2"}],
        "cells": [cell("A", "m = 1", 0.5, 0.9), cell("B", "m = 1", 0.6), cell("A", "m = 2", None, 0.8)],
        **changes,
    }
    return parse(values)


def test_ours_stands_beside_the_papers_and_the_best_of_ours_is_bold() -> None:
    (table,) = tables(result())
    assert markdown_table(table).splitlines() == [
        "|  | m = 1 |",
        "| --- | --- |",
        "| A | 50.0 ± 1.0 \\| 90.00 |",
        "| B | **60.0 ± 1.0** \\| – |",
    ]
    assert table.title == "Average, ours | P"


def test_controls_of_instance_prompts_have_a_table_of_their_own() -> None:
    names = ("accuracy", "accuracy_mean_prompt", "accuracy_other_prompt", "attention")
    said = {
        f"diagnostic:instance.{name}": {"mean": value} for name, value in zip(names, (0.8, 0.6, 0.4, 0.1), strict=True)
    }
    figures = {"average": {"mean": 0.8}, "mutual_information": {"mean": 0.00512}, **said}
    plain, controls = tables(result(cells=[cell("A", "m = 1", 0.5), cell("B", "m = 1", 0.5, figures=figures)]))
    assert plain.title == "Average, ours"
    assert [[text.text for text in line] for line in controls.lines] == [
        ["B, m = 1", "80.0", "60.0", "40.0", "10.0", "5.1e-03"]
    ]


def test_the_papers_columns_are_shown_where_none_of_them_was_run() -> None:
    (table,) = tables(result(cells=[cell("A", "m = 1", None, 0.9), cell("A", "m = 2", None, 0.8)]))
    assert [text.text + text.rest for text in table.lines[0]] == ["A", "– | 90.00", "– | 80.00"]


def test_domains_stand_beside_the_papers_in_a_table_of_their_own() -> None:
    def of(row: str, ours: dict[str, float], paper: dict[str, float]) -> dict[str, Any]:
        both = ({key: {"mean": value} for key, value in side.items()} for side in (ours, paper))
        return {"row": row, "column": "m = 1", "runs": [RUN], **dict(zip(("figures", "paper"), both, strict=True))}

    found = result(
        cells=[
            of("A", {"average": 0.5, "domain:photo": 0.4, "domain:ours": 0.1}, {"average": 0.9, "domain:photo": 0.8}),
            of("B", {"average": 0.6, "domain:photo": 0.7}, {"domain:sketch": 0.3}),
        ]
    )
    average, domains = tables(found)
    assert (average.header, domains.header) == (("", "m = 1"), ("", "photo", "sketch", "ours"))
    assert domains.title == "m = 1 by domain, ours | P"
    assert [[(text.text + text.rest, text.bold) for text in line[1:]] for line in domains.lines] == [
        [("40.0 | 80.00", False), ("– | –", False), ("10.0 | –", False)],
        [("70.0 | –", True), ("– | 30.00", False), ("– | –", False)],
    ]


def test_a_cell_without_a_finished_run_says_failed_and_a_note_says_why() -> None:
    found = result(cells=[cell("A", "m = 1", None, 0.9, runs=[BROKEN])])
    (table,) = tables(found)
    assert table.lines[0][1].text == "failed"
    assert reproduction_notes(found) == ["A, m = 1, seed 1 failed: DivergenceError: nan"]


def test_without_a_paper_there_is_no_second_number() -> None:
    (table,) = tables(result(paper=None, cells=[cell("A", "m = 1", 0.5)]))
    assert (table.title, table.lines[0][1].text, table.lines[0][1].rest) == ("Average, ours", "50.0 ± 1.0", "")


def test_nothing_is_bold_where_all_are_level() -> None:
    (table,) = tables(result(cells=[cell("A", "m = 1", 0.5), cell("B", "m = 1", 0.5001)]))
    assert [line[1].bold for line in table.lines] == [False, False]


def test_a_terminal_shows_the_same_table() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(rich_table(tables(result())[0]))
    assert "50.0 ± 1.0 | 90.00" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_measurement_shows_the_figures_its_columns_name_and_ranks_inside_groups() -> None:
    found = result(
        kind="measurement",
        rows=[{"title": title, "group": group} for title, group in (("A", "x"), ("B", "x"), ("C", "y"))],
        columns=[{"title": "both", "cell": "c", "figures": ["average", "server_auc"]}],
        cells=[
            cell("A", "c", figures={"average": {"mean": 0.5}, "server_auc": {"mean": 0.625}}),
            cell("B", "c", figures={"average": {"mean": 0.7}}),
            cell("C", "c", figures={"average": {"mean": 0.1}}),
        ],
    )
    (table,) = tables(found)
    assert [(line[1].text, line[1].bold, line[1].rest) for line in table.lines] == [
        ("50.0", False, " / 0.62"),
        ("70.0", True, ""),
        ("10.0", False, ""),
    ]


def test_the_numbers_of_a_method_are_told_with_the_papers_and_a_link() -> None:
    lines = method_numbers([result()], "fedvpt", "../results.md").splitlines()
    assert lines[2:] == [
        "| [Table 1 of P, on digits](../results.md#table-1-of-p-on-digits) | m = 1: A | 50.0 ± 1.0 | – | 90.00 |"
    ]
    assert method_numbers([result()], "sgpt") == ""


def test_an_anchor_is_what_the_page_makes_of_the_heading() -> None:
    assert anchor("Table 3 of P (x, y), CIFAR-100: half") == "table-3-of-p-x-y-cifar-100-half"
    assert anchor("Is P over -D, m = 6?") == "is-p-over--d-m--6"


def test_the_page_says_what_was_not_recorded() -> None:
    text = " ".join(page([result()]).split())
    assert "not recorded: date, versions, hardware, data, backbone" in text
    hardware = {"cpu": "Z80", "cores": 2, "memory_bytes": 65536, "threads": "1"}
    text = " ".join(page([result(date="2026-01-02", hardware=hardware)]).split())
    assert "date: 2026-01-02 · hardware: Z80, 2 cores, 65.5 kB, 1 threads" in text


@pytest.mark.parametrize(
    ("note", "drawn"),
    [
        ("No setting of `train` is given", "No setting of `train` is given"),
        ("`train.lrs.gate.*` 0.01, here *3*", "`train.lrs.gate.*` 0.01, here \\*3\\*"),
        ("one ` alone <b>", "one \\` alone \\<b>"),
        ("`a <b> | c` | d", "`a <b> | c` \\| d"),
        ("a \\`b`", "a \\\\`b`"),
        ("two\nlines `of\n# code`", "two lines `of # code`"),
    ],
)
def test_code_in_a_note_stays_code_and_all_other_marks_are_escaped(note: str, drawn: str) -> None:
    assert f"\n- {drawn}\n" in page([result(notes=[note])])


def test_prose_of_the_page_wraps_and_its_tables_code_and_links_do_not() -> None:
    text = "| " + "cell " * 40 + "|\n```\n" + "command " * 40 + "\n```\n- " + "word " * 60 + "[link](" + "x" * 130 + ")"
    lines = wrapped(text).split("\n")
    assert [len(line) > 120 for line in lines[:4]] == [True, False, True, False]
    assert all(len(line) <= 120 for line in lines[4:-1])
    assert all(line.startswith("  word") for line in lines[5:-1])
    assert " ".join(wrapped(text).split()) == " ".join(text.split())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "fedprompt-results-9"}, "format must be 'fedprompt-results-1', got 'fedprompt-results-9'"),
        ({"colour": "red"}, "colour is not a known setting"),
        ({"kind": "guess"}, "kind must"),
        ({"cells": [{"row": "A"}]}, r"cells\.0\.column must be given"),
        ({"cells": [cell("A", "m = 1", runs=[{**RUN, "status": "maybe"}])]}, r"cells\.0\.runs\.0\.status must"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RunError, match=complaint):
        result(**changes)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "fedprompt-results-1", "format": 1}', "\xff"])
def test_bytes_that_are_no_result_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match=r"r\.json"):
        load(tmp_path / "r.json")


def test_a_grid_of_our_own_is_a_section_beside_the_tables_of_papers() -> None:
    written = page([result(name="mine", title="Mine", paper=None), result()]).splitlines()
    headings = [line for line in written if line.startswith("##")]
    assert headings == ["## Tables of papers, in small", "### Table 1 of P, on digits", "## Mine"]


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    save(result(), tmp_path / "r.json")
    assert load(tmp_path / "r.json") == result()


def test_a_folder_gives_reproductions_first_and_leaves_other_files_alone(tmp_path: Path) -> None:
    save(result(kind="measurement", experiment="a"), tmp_path / "a.json")
    save(result(), tmp_path / "b.json")
    (tmp_path / "trials.json").write_text(json.dumps({"seed": 1}))
    assert [each.experiment for each in load_all(tmp_path)] == ["p-t", "a"]


STORED = load_all(ROOT / "benchmarks/accuracy")


def test_the_page_of_results_is_the_one_that_the_stored_results_give() -> None:
    written = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert written == page(STORED), "run `make results` and commit docs/results.md"


@pytest.mark.parametrize("stored", STORED, ids=lambda each: each.experiment)
def test_a_stored_result_is_complete(stored: Any) -> None:
    assert (ROOT / "benchmarks/accuracy" / f"{stored.experiment}.json").is_file()
    assert len({row.title for row in stored.rows}) == len(stored.rows)
    places = [(each.row, each.column) for each in stored.cells]
    assert len(set(places)) == len(places)
    assert {row for row, _ in places} <= {row.title for row in stored.rows}
    assert {column.cell or column.title for column in stored.columns} >= {column for _, column in places}
    assert stored.commands
    if stored.kind == "reproduction":
        assert stored.date
        assert stored.versions
        assert stored.hardware
        assert stored.data
        assert stored.backbones
        for run in (run for each in stored.cells for run in each.runs or []):
            assert run.hash
            assert run.status == "failed" or {"average", "worst", "ece", "bytes_total", "seconds"} <= set(run.figures)


def test_headings_of_the_page_are_different_so_that_links_find_theirs() -> None:
    anchors = [anchor(each.title) for each in STORED]
    assert len(set(anchors)) == len(anchors)
