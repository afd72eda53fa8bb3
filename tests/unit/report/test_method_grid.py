"""Methods by settings, as papers print them."""

import pytest

from fedprompt.report import method_grid
from fedprompt.report.html_report import render
from fedprompt.report.latex_table import latex
from fedprompt.report.method_grid import arrange, grid_cells

pytestmark = pytest.mark.unit


@pytest.fixture
def cell(write):
    """A run of a method with so many domains for a client: `cell("fedvpt", 2, [9, 5])`, with correct answers of 10 by client."""

    def make(method, domains, correct, seed=0, done=2):
        settings = {"method": {"name": method}, "partition": {"domains_per_client": domains}, "seed": seed}
        return write(f"{method}-{domains}-{seed}", [correct] * done, federation={"rounds": 2}, **settings)

    return make


def texts(arranged):
    return [[cell.text for cell in line] for line in grid_cells(arranged)]


def bold(arranged):
    return [[cell.bold for cell in line] for line in grid_cells(arranged)]


def test_a_grid_has_average_and_worst_of_every_setting_side_by_side(cell):
    found = arrange([cell("a", 2, [9, 5]), cell("a", 1, [8, 4]), cell("b", 1, [6, 6]), cell("b", 2, [3, 1])])
    assert found.is_grid
    assert [column.label for column in found.columns] == ["domains per client 1", "domains per client 2"]
    assert texts(found) == [["a", "60.00", "40.00", "70.00", "50.00"], ["b", "60.00", "60.00", "20.00", "10.00"]]


def test_the_best_of_every_column_is_bold_and_equals_share_it(cell):
    found = arrange([cell("a", 1, [8, 4]), cell("a", 2, [9, 5]), cell("b", 1, [6, 6]), cell("b", 2, [3, 1])])
    assert bold(found) == [[False, True, False, True, True], [False, True, True, False, False]]


def test_seeds_are_one_cell_with_mean_and_deviation(cell):
    runs = [cell(method, domains, [5], seed) for method in "ab" for domains in (1, 2) for seed in (0, 1)]
    runs[0] = cell("a", 1, [9], seed=7)
    assert texts(arrange(runs))[0][1] == "70.00 ± 28.28"


def test_numbers_stand_by_size_and_not_as_texts(cell):
    found = arrange([cell(method, domains, [5]) for domains in (10, 9, 2) for method in "ab"])
    assert [column.label for column in found.columns] == [f"domains per client {number}" for number in (2, 9, 10)]


def test_an_empty_place_is_a_dash(cell):
    found = arrange([cell("a", 1, [8]), cell("a", 2, [9]), cell("b", 1, [6])])
    assert texts(found)[1] == ["b", "60.00", "60.00", "–", "–"]


def test_a_cell_that_stopped_early_is_marked_and_never_the_best(cell):
    early = cell("a", 1, [9, 9], done=1)
    found = arrange([early, cell("a", 2, [5, 5]), cell("b", 1, [5, 5]), cell("b", 2, [4, 4])])
    assert texts(found)[0][1:3] == ["90.00 †", "90.00 †"]
    assert [line[1] for line in bold(found)] == [False, False]
    assert method_grid.remarks(found)[1].startswith("† stopped")


def test_seeds_that_stopped_earlier_than_others_of_their_cell_are_named(cell):
    whole = [cell(method, domains, [5]) for method in "ab" for domains in (1, 2)]
    found = arrange([cell("a", 1, [9], seed=1, done=1), *whole])
    assert texts(found)[0][1] == "50.00"
    assert method_grid.remarks(found)[-1] == "Left out, others of the same setting got farther: a-1-1."


def test_what_concerns_one_column_is_said_with_its_name(cell):
    runs = [cell("a", 1, [5]), cell("a", 2, [5], done=1), cell("b", 1, [5]), cell("b", 2, [5])]
    assert method_grid.warnings(arrange(runs)) == ["domains per client 2: Unfinished: a (1/2 rounds)"]
    assert "% domains per client 2: Unfinished: a (1/2 rounds)" in latex(runs)


def test_one_task_is_no_grid(write):
    found = arrange([write("a", [[9]]), write("b", [[8]], method={"name": "head_tune"})])
    assert not found.is_grid
    assert [column.label for column in found.columns] == [""]


def test_methods_on_tasks_of_their_own_are_no_grid_and_share_no_column(cell):
    found = arrange([cell("a", 1, [9]), cell("b", 2, [8])])
    assert not found.is_grid
    assert [list(column.families) for column in found.columns] == [[0], [1]]


def test_a_method_keeps_its_number_in_every_column(cell):
    found = arrange([cell("a", 1, [8]), cell("b", 1, [9]), cell("b", 2, [9]), cell("c", 1, [8]), cell("c", 2, [8])])
    assert found.labels == ("a", "b", "c")
    assert [list(column.families) for column in found.columns] == [[0, 1, 2], [1, 2]]


def test_runs_that_stopped_at_different_rounds_keep_their_own_rows_without_a_grid(runs, unfinished):
    assert arrange([*runs, unfinished]).labels == ("fedvpt", "head_tune", "fedvpt (1/2 rounds)")


def test_the_page_opens_with_the_grid(cell):
    page = render([cell(method, domains, [5]) for method in "ab" for domains in (1, 2)])
    assert page.index('colspan="2" scope="colgroup">domains per client 1<') < page.index("All figures")
    assert "columns differ in partition.domains_per_client" in page


def test_remarks_tell_how_many_seeds_there_are(cell):
    runs = [cell(method, domains, [5]) for method in "ab" for domains in (1, 2)] + [cell("a", 1, [6], seed=1)]
    assert "over 1 to 2 seeds" in method_grid.remarks(arrange(runs))[0]
    assert "in per cent, of one seed; columns" in method_grid.remarks(arrange(runs[:-1]))[0]
