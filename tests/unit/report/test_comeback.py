"""A client's accuracy by round, with and without its absence."""

from pathlib import Path

import pytest

from fedprompt.report.comeback import comeback_table, save_comeback

pytestmark = pytest.mark.unit

AWAY = {"federation": {"rounds": 3, "away": {"client_1": [2, 2]}}}


def test_columns_say_who_was_away_and_rounds_when_and_seeds_are_averaged(write):
    runs = [
        write("a", [[1, 2], [1, 4], [1, 6]]),
        write("b", [[1, 4], [1, 5], [1, 6]], seed=1),
        write("c", [[1, 2], [1, 3], [1, 9]], **AWAY),
    ]
    assert comeback_table(runs, "client_1", (2, 2)).splitlines() == [
        "accuracy of client_1 in per cent, away in rounds 2 to 2",
        "round  fedvpt present  fedvpt away",
        "    1           30.00        20.00",
        "    2           45.00        30.00  away",
        "    3           60.00        90.00",
    ]


def test_a_client_that_was_never_tested_has_no_figures(write):
    assert len(comeback_table([write("a", [[1, 2]])], "nobody", (1, 1)).splitlines()) == 2


def test_a_round_that_one_side_did_not_evaluate_has_a_dash(write):
    runs = [write("a", [[1, 2], [1, 4]], federation={"rounds": 3}), write("b", [[1, 2]], **AWAY)]
    table = comeback_table(runs, "client_1", (2, 2))
    assert table.splitlines()[1].endswith("fedvpt away (1/3 rounds)")
    assert table.splitlines()[-1].split() == ["2", "40.00", "–", "away"]


def test_the_picture_is_a_png(write, tmp_path: Path):
    runs = [write("a", [[1, 2], [1, 4], [1, 6]]), write("b", [[1, 2], [1, 3], [1, 9]], **AWAY)]
    path = save_comeback(runs, "client_1", (2, 2), tmp_path / "deep" / "x.png")
    assert path.read_bytes().startswith(b"\x89PNG")
