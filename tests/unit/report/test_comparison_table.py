import csv
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from fedprompt.report import comparison_table
from fedprompt.report.comparison_table import (
    Spread,
    cells,
    columns,
    comparison,
    explanations,
    format_bytes,
    header,
    notes,
    spread,
)
from fedprompt.report.table_formats import csv as as_csv
from fedprompt.report.table_formats import json_rows, markdown, rich_tables
from fedprompt.report.tasks import Task, by_task

pytestmark = pytest.mark.unit


def one(rows):
    """The rows as if they were one task."""
    return [Task("", tuple(rows))]


def value(row, key):
    found = row.values[key]
    assert found is not None
    return found


def test_mean_and_sample_deviation_over_seeds(runs):
    row = comparison(runs)[0]
    first, second = (run.summary()["average"] for run in runs[:2])
    assert row.seeds == (0, 1)
    assert value(row, "average").mean == pytest.approx((first + second) / 2)
    assert value(row, "average").std == pytest.approx(abs(first - second) / 2**0.5)


def test_average_and_worst_are_those_of_the_formula(write):
    row = comparison([write("a", [[9, 5], [8, 6]], federation={"rounds": 2, "evaluate_last": 2})])[0]
    assert value(row, "average") == Spread(pytest.approx((0.7 + 0.7) / 2), None)
    assert value(row, "worst").mean == pytest.approx((0.5 + 0.6) / 2)
    assert value(row, "std").mean == pytest.approx((0.2 + 0.1) / 2)


def test_final_figures_and_means_of_the_last_rounds_have_names_of_their_own(write):
    rows = comparison([write("a", [[9, 5], [8, 6], [4, 2]], federation={"rounds": 3, "evaluate_last": 2})])
    line = dict(zip(header(columns(rows)), (cell.text for cell in cells(rows, columns(rows))[0]), strict=True))
    assert line["Average (mean of last 2)"] == "50.00"
    assert line["Average (final)"] == "30.00"
    assert line["Worst Local (mean of last 2)"] == "40.00"
    assert line["Worst Local (final)"] == "20.00"
    assert "Average" not in line
    assert "all others are means of the last 2 evaluated rounds" in explanations(rows)[0]


def test_where_only_the_last_round_counts_there_is_one_name(write):
    rows = comparison([write("a", [[9, 5], [4, 2]], federation={"rounds": 2, "evaluate_last": 1})])
    assert header(columns(rows))[1:4] == ["Average", "Worst Local", "Best"]
    assert "All are those of the last evaluated round." in explanations(rows)[0]


def test_rows_that_are_means_of_different_numbers_of_rounds_do_not_name_one_of_them(write):
    made = [
        write("a", [[9], [8]], federation={"rounds": 2, "evaluate_last": 2}),
        write("b", [[9], [8]], federation={"rounds": 2, "evaluate_last": 1}),
    ]
    assert "Average (mean of last rounds)" in header(columns(comparison(made)))


def test_json_has_the_same_keys_whatever_the_table_shows(write):
    for last in (1, 2):
        federation = {"rounds": 2, "evaluate_last": last}
        row = json_rows(by_task([write(f"a{last}", [[9], [7]], federation=federation)]))[0]
        assert (row["average"]["mean"], row["final_average"]["mean"]) == (pytest.approx(0.7 if last == 1 else 0.8), 0.7)


def test_best_is_the_highest_average_of_any_round(write):
    row = comparison([write("a", [[9, 9], [1, 1]], federation={"rounds": 2, "evaluate_last": 1})])[0]
    assert value(row, "best_average").mean == pytest.approx(0.9)
    assert value(row, "average").mean == pytest.approx(0.1)


def test_seeds_on_other_weights_are_a_row_of_their_own_and_not_comparable(write):
    rows = comparison([write("a", [[9]]), write("b", [[5]], seed=1), write("c", [[1]], seed=2, digest="0123456789ab")])
    assert [(row.label, row.seeds) for row in rows] == [
        ("fedvpt backbone weights", (0, 1)),
        ("fedvpt backbone 01234567", (2,)),
    ]
    assert notes(rows)[0].startswith("Not comparable, these settings differ: backbone.digest: ")


def test_one_seed_has_no_deviation():
    assert spread([0.5]) == Spread(0.5, None)


def test_bytes_each_leave_out_round_zero_and_the_total_holds_it(write):
    row = comparison([write("a", [[9, 5], [8, 6]])])[0]
    assert value(row, "bytes_up_each").mean == 40 / 2
    assert value(row, "bytes_down_each").mean == 80 / 2
    assert value(row, "bytes_total").mean == 2 * (80 + 40) + 2000


def test_seconds_add_up_phases_and_rounds(write):
    assert value(comparison([write("a", [[9], [8]])])[0], "seconds").mean == pytest.approx(2 * (1.5 + 0.5))


def test_methods_are_rows_of_their_own_in_the_order_given(runs):
    assert [row.label for row in comparison(runs)] == ["fedvpt", "head_tune"]
    assert [row.label for row in comparison(runs[::-1])] == ["head_tune", "fedvpt"]


def test_families_of_one_method_are_told_apart_by_what_differs(write):
    rows = comparison([write("a", [[9]], train={"lr": 0.1}), write("b", [[8]], train={"lr": 0.2}), write("c", [[7]])])
    assert [row.label for row in rows] == ["fedvpt lr=0.1", "fedvpt lr=0.2", "fedvpt lr=auto"]


def test_a_setting_that_one_family_left_out_is_called_default(write):
    rows = comparison([write("a", [[9]]), write("b", [[8]], method={"name": "fedvpt", "depth": 2})])
    assert [row.label for row in rows] == ["fedvpt depth=default", "fedvpt depth=2"]


def test_the_name_of_a_run_makes_no_family(write):
    rows = comparison([write("a", [[9]], name="x"), write("b", [[8]], name="y", seed=1)])
    assert [row.seeds for row in rows] == [(0, 1)]


def test_a_seed_counts_once_and_the_other_run_is_named(write):
    rows = comparison([write("a", [[9]]), write("again", [[9]])])
    assert rows[0].seeds == (0,)
    assert notes(rows) == ["Left out, the same seed is already counted: again"]


def test_an_unfinished_run_is_flagged_and_not_mixed(runs, unfinished):
    rows = comparison([*runs[:2], unfinished])
    assert [row.seeds for row in rows] == [(0, 1), (2,)]
    assert [row.title for row in rows] == ["fedvpt", "fedvpt (1/2 rounds)"]
    assert notes(rows) == ["Unfinished: fedvpt (1/2 rounds)"]
    assert "fedvpt (1/2 rounds)" in markdown(one(rows))


def test_an_unfinished_run_does_not_win(write):
    early = write("early", [[10]], method={"name": "local"}, federation={"rounds": 5})
    rows = comparison([write("a", [[5]]), write("b", [[6]], method={"name": "head_tune"}), early])
    assert comparison_table.winners(rows, "average") == {1}


def test_a_run_without_evaluation_has_dashes(write):
    text = markdown(by_task([write("a", [])]))
    assert "| fedvpt (0/1 rounds) | – | – |" in text


def test_markdown_sets_the_best_average_and_worst_in_bold(write):
    rows = comparison([write("a", [[9, 5]]), write("b", [[7, 6]], method={"name": "local"})])
    lines = markdown(one(rows)).splitlines()
    assert lines[2].startswith("| fedvpt | **70.00** | 50.00 |")
    assert lines[3].startswith("| local | 65.00 | **60.00** |")


def test_markdown_writes_per_cent_with_the_deviation(write):
    rows = comparison([write("a", [[9]]), write("b", [[8]], seed=1)])
    assert "| fedvpt | 85.00 ± 7.07 |" in markdown(one(rows))


def test_rows_that_print_the_same_are_both_best(write):
    rows = comparison([write("a", [[7]]), write("b", [[7]], method={"name": "local"})])
    assert comparison_table.winners(rows, "average") == {0, 1}


def test_markdown_escapes_what_would_break_the_table(write):
    text = markdown(by_task([write("a", [[9]], data={"source": "x|y"}), write("b", [[9]], data={"source": "<z*"})]))
    assert "### x\\|y" in text
    assert "### \\<z\\*" in text


def test_json_rows_round_trip_at_full_precision(runs):
    rows = comparison(runs)
    back = json.loads(json.dumps(json_rows(one(rows))))
    assert back == json_rows(one(rows))
    assert back[0]["average"]["mean"] == value(rows[0], "average").mean
    assert back[0]["seeds"] == [0, 1]


def test_csv_round_trips_at_full_precision(runs, unfinished):
    rows = comparison([*runs, unfinished])
    back = list(csv.DictReader(io.StringIO(as_csv(one(rows)))))
    assert [line["label"] for line in back] == [row.label for row in rows]
    assert [line["finished"] for line in back] == ["true", "true", "false"]
    assert float(back[0]["worst"]) == value(rows[0], "worst").mean
    assert float(back[0]["worst_std"]) == value(rows[0], "worst").std
    assert back[2]["worst_std"] == ""


def how(trials, passes):
    """What `fedprompt tune` writes into the config that it found."""
    cost = {"trials": trials, "pruned": 2, "diverged": 1, "rounds": 40, "seconds": 61.4, "image_passes": passes}
    found = {"objective": "average", "value": 0.8, "validation": 0.5, "data": "d", "fedprompt": "0", "chosen": {}}
    return {"study": "s", "seed": 0, **cost, **found}


def test_a_table_of_tuned_configs_says_what_each_method_was_given_and_whether_that_was_the_same(write):
    made = [
        write("a", [[9, 5]], method={"name": "fedvpt"}, tuned=how(18, 5000)),
        write("b", [[8, 6]], method={"name": "sgpt"}, tuned=how(20, 5000)),
        write("c", [[8, 7]], method={"name": "head_tune"}),
    ]
    said = dict(line.split(": ", 1) for line in notes(comparison(made)))
    assert said["Settings tuned on validation images"] == (
        "fedvpt: 18 trials (2 ended early, 1 diverged), 40 rounds, 5000 image passes, 61 s; "
        "sgpt: 20 trials (2 ended early, 1 diverged), 40 rounds, 5000 image passes, 61 s"
    )
    assert said["Settings not tuned"] == "head_tune"
    assert said["Not tuned equally"] == "trials 18 and 20"
    alike = [write(name, [[9, 5]], method={"name": name}, tuned=how(18, 5000)) for name in ("fedvpt", "sgpt")]
    assert not any(line.startswith(("Not tuned equally", "Settings not tuned")) for line in notes(comparison(alike)))


def test_comparable_runs_have_no_notes(runs):
    assert notes(comparison(runs[:2])) == []


def test_runs_on_other_data_are_noted_and_do_not_compete(write):
    other = write("b", [[6]], method={"name": "local"}, data={"source": "tiny"})
    rows = comparison([write("a", [[9]]), other])
    assert notes(rows) == ["Not comparable, these settings differ: data.source: embedded (fedvpt) | tiny (local)"]
    assert comparison_table.winners(rows, "average") == set()


def test_another_number_of_rounds_is_noted(write):
    rows = comparison([write("a", [[9]]), write("b", [[6], [7]], method={"name": "local"})])
    assert notes(rows) == ["Different training budget or measurement: federation.rounds: 1 (fedvpt) | 2 (local)"]


HELD_OUT = {"rounds": 1, "held_out": 0.5}


def test_runs_with_held_out_clients_are_noted_and_do_not_compete_with_plain_ones(write):
    rows = comparison([write("a", [[9]]), write("b", [[6]], method={"name": "local"}, federation=HELD_OUT)])
    assert notes(rows) == [
        "Not comparable, these settings differ: federation.held_out: 0.0 (fedvpt) | 0.5 (local)",
        "Only clients held out of training are evaluated: local",
    ]
    assert comparison_table.winners(rows, "average") == set()


def test_runs_with_held_out_clients_compete_with_each_other(write):
    runs = [
        write("a", [[9]], federation=HELD_OUT),
        write("b", [[6]], method={"name": "local"}, federation={**HELD_OUT, "newcomer_epochs": 1}),
    ]
    rows = comparison(runs)
    assert notes(rows) == [
        "Different training budget or measurement: federation.newcomer_epochs: 5 (fedvpt) | 1 (local)",
        "Only clients held out of training are evaluated: all rows",
    ]
    assert comparison_table.winners(rows, "average") == {0}


def test_one_method_with_and_without_held_out_clients_has_two_labels(write):
    rows = comparison([write("a", [[9]]), write("b", [[6]], federation=HELD_OUT)])
    assert [row.label for row in rows] == ["fedvpt held_out=0.0", "fedvpt held_out=0.5"]


def test_a_table_of_nothing_has_no_notes():
    assert notes([]) == []


def test_terminal_table_names_methods_figures_and_notes(runs, unfinished):
    console = Console(width=120, file=io.StringIO(), record=True)
    rows = comparison([*runs, unfinished])
    console.print(rich_tables(one(rows), 120)[0])
    text = console.export_text()
    assert "head_tune" in text
    assert comparison_table.percent(value(rows[0], "average")) in text
    assert "Unfinished: fedvpt (1/2 rounds)" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (15360, "15.4 kB"), (999_960, "1.0 MB"), (2.5e9, "2.5 GB"), (3e12, "3.0 TB")],
)
def test_bytes_are_written_in_decimal_units(count, text):
    assert format_bytes(count) == text


def test_tables_and_pages_load_neither_torch_nor_matplotlib():
    code = "import sys, fedprompt.report.html_report; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
