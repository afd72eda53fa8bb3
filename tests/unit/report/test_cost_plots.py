"""Time by phase, refused updates and privacy: figures from run files, and their pictures."""

import json
import math

import numpy as np
import pytest

from fedprompt.errors import RunError
from fedprompt.report import cost_plots, events, plot_style
from fedprompt.report.html_report import render
from fedprompt.report.method_grid import arrange
from fedprompt.report.sections import listed, privacy_budget, refused_updates, time_by_phase
from fedprompt.runs.families import families
from fedprompt.runs.run import Run
from fedprompt.runs.store import PRIVACY, REFUSED, RunStore

pytestmark = pytest.mark.unit


@pytest.fixture
def noted(write):
    """A run with events: `noted("name", [(round, client, kind, detail)], correct)`."""

    def make(name, found, correct=None, **changes):
        run = write(name, correct or [[9, 5], [8, 6]], **changes)
        store = RunStore(run.directory)
        for round, client, kind, detail in found:
            store.note(round, client, kind, detail if isinstance(detail, str) else json.dumps(detail))
        store.close()
        return Run(run.directory)

    return make


def refusal(round, client, rule="norm"):
    return (round, client, REFUSED, {"rule": rule, "value": "too long"})


def spent(round, epsilon):
    return (round, None, PRIVACY, {"epsilon": epsilon, "delta": 1e-5, "noise": 1.5, "rounds": 1, "clip": 0.5})


def groups(runs):
    return dict(enumerate(families(runs)))


def test_seconds_by_phase_are_sums_over_rounds_and_means_over_seeds(write):
    (family,) = families([write("a", [[9], [8]]), write("b", [[9], [8]], seed=1)])
    assert events.phase_seconds(family) == {"train": pytest.approx(3.0), "evaluate": pytest.approx(1.0)}


def test_bars_are_cut_into_phases_one_after_the_other(write):
    figure = cost_plots.phase_bars(groups([write("a", [[9], [8]])]))
    bars = figure.axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [
        (0, pytest.approx(3.0)),
        (pytest.approx(3.0), pytest.approx(1.0)),
    ]
    assert len({bar.get_hatch() for bar in bars}) == 2  # no colour alone


def test_the_table_of_phases_ends_with_their_sum(write):
    (table,) = time_by_phase(arrange([write("a", [[9], [8]])])).tables
    assert table.head == ["Method", "train", "evaluate", "Total"]
    assert [cell.text for cell in table.rows[0]] == ["fedvpt", "3.00", "1.00", "4.00"]


def test_refusals_tell_round_client_and_rule(noted):
    run = noted("a", [refusal(1, 1), refusal(2, 0, "finite"), (1, None, "resumed", "no JSON")])
    assert [(each.round, each.client, each.rule) for each in events.refusals(run)] == [(1, 1, "norm"), (2, 0, "finite")]


def test_refused_updates_are_listed_by_run_and_rule(noted):
    part = refused_updates([noted("a", [refusal(1, 1), refusal(2, 1), refusal(2, 0, "finite")])])
    assert [[cell.text for cell in row] for row in part.tables[0].rows] == [
        ["a", "finite", "1", "2", "client_0", "too long"],
        ["a", "norm", "2", "1, 2", "client_1", "too long"],
    ]
    assert [picture.name for picture in part.pictures] == ["refused-a"]


def test_a_refused_update_is_a_mark_at_its_round_and_client(noted):
    axes = cost_plots.refusal_picture(noted("a", [refusal(1, 1), refusal(2, 0, "finite")])).axes[0]
    places = [marks.get_offsets().tolist() for marks in axes.collections]
    assert places == [[[2, 0]], [[1, 1]]]  # finite, norm
    assert [label.get_text() for label in axes.get_yticklabels()] == ["client_0", "client_1"]


def test_very_many_refused_clients_are_counted_by_round(noted):
    run = noted("a", [refusal(1 + client % 2, client) for client in range(101)], [[5] * 101, [5] * 101])
    bars = cost_plots.refusal_picture(run).axes[0].patches
    assert [bar.get_height() for bar in bars] == [51, 50]


def test_a_refusal_of_somebody_who_is_no_client_does_not_break_the_picture(noted):
    run = noted("a", [refusal(1, 99), refusal(1, None)])
    plot_style.png(cost_plots.refusal_picture(run), dpi=20)
    assert "unknown client (99)" in refused_updates([run]).tables[0].rows[0][4].text


def test_privacy_is_epsilon_by_round(noted):
    found = events.privacy_spent(noted("a", [spent(1, 0.5), spent(2, 0.75)]))
    assert found is not None
    assert (found.epsilons, found.total) == ({1: 0.5, 2: 0.75}, 0.75)
    assert (found.noise, found.delta, found.clip) == (1.5, 1e-5, 0.5)


def test_without_noise_epsilon_is_infinite_and_not_drawn(noted):
    run = noted("a", [spent(1, None)])
    found = events.privacy_spent(run)
    assert found is not None
    assert math.isinf(found.total)
    part = privacy_budget(arrange([run]))
    assert part.tables[0].rows[0][5].text == "inf"
    plot_style.png(part.pictures[0].figure, dpi=20)


def test_the_picture_shows_the_seed_that_spent_most(noted):
    runs = [noted("a", [spent(1, 0.5)]), noted("b", [spent(1, 0.9)], seed=1)]
    (picture,) = privacy_budget(arrange(runs)).pictures
    np.testing.assert_allclose(picture.figure.axes[0].get_lines()[0].get_ydata(), [0.9])


def test_the_budget_is_a_line_and_a_column(noted):
    privacy = {"noise": 1.0, "max_epsilon": 3.0}
    part = privacy_budget(arrange([noted("a", [spent(1, 0.5)], privacy=privacy)]))
    assert 3.0 in [line.get_ydata()[0] for line in part.pictures[0].figure.axes[0].get_lines()]
    assert part.tables[0].rows[0][-1].text == "3"


def test_sections_without_content_are_left_out(write):
    page = render([write("a", [[9]])])
    assert "Rejected updates" not in page
    assert "Privacy budget" not in page
    assert "Domains" not in page


def test_an_event_that_is_not_as_it_was_written_is_damage(noted):
    with pytest.raises(RunError, match="event 'refused' of round 1"):
        render([noted("a", [(1, 0, REFUSED, "not JSON")])])


def test_long_lists_are_cut():
    assert listed(["1", "2"]) == "1, 2"
    assert listed([str(number) for number in range(11)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
