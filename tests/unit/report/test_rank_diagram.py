"""Ranks over tasks, and the bars that join methods that are level."""

import pytest

from fedprompt.report.html_report import render
from fedprompt.report.method_grid import arrange
from fedprompt.report.rank_diagram import level_groups, rank_picture, ranked_methods

pytestmark = pytest.mark.unit


@pytest.fixture
def grid(write):
    """Methods a, b and c on some tasks, in this order of accuracy."""

    def make(tasks, missing=()):
        return [
            write(f"{name}{task}", [[right]], method={"name": name}, partition={"domains_per_client": task})
            for task in range(1, tasks + 1)
            for name, right in (("a", 9), ("b", 7), ("c", 5))
            if (name, task) not in missing
        ]

    return make


def test_methods_are_ranked_in_every_task(grid):
    found = ranked_methods(arrange(grid(4)))
    assert found is not None
    assert found.ranking.ranks == (1.0, 2.0, 3.0)
    assert found.labels == ("a", "b", "c")
    assert "tells them apart (p = 0.018)" in found.sentence


def test_two_tasks_are_too_few(grid):
    assert ranked_methods(arrange(grid(2))) is None


def test_a_method_that_misses_a_task_is_left_out(grid):
    assert ranked_methods(arrange(grid(3, missing=[("c", 2)]))) is None, "two methods have a sign test"


@pytest.mark.parametrize(
    ("critical", "spans"),
    [(0.4, []), (1.1, [(1.0, 2.0), (2.0, 2.5)]), (1.6, [(1.0, 2.5)]), (5.0, [(1.0, 4.5)])],
)
def test_bars_join_the_longest_spans_below_the_critical_difference(critical, spans):
    assert level_groups([2.5, 1.0, 4.5, 2.0], critical) == spans


def test_the_picture_has_the_best_on_top_and_a_bar_for_every_span(grid):
    found = ranked_methods(arrange(grid(3)))
    assert found is not None
    axes = rank_picture(found).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.lines[0].get_xdata().tolist() == [1.0, 2.0]
    assert axes.yaxis_inverted()


def test_the_page_has_the_diagram_from_three_tasks_on(grid):
    runs = grid(3)
    assert "Ranks over tasks" in render(runs)
    assert "Ranks over tasks" not in render(runs[:6])
