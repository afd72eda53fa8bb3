"""Clients that no round has picked: their local head is untrained, and the tables say so."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support import StopAfter, Stopped, content, run

from fedprompt.core.client_sampling import sample_cohort
from fedprompt.metrics.accuracy import ClientResult, conclude, is_summary, summarise
from fedprompt.report import comparison_table
from fedprompt.report.comparison_table import comparison, notes
from fedprompt.report.table_formats import markdown
from fedprompt.report.tasks import Task
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit

FEW = {"rounds": 2, "fraction": 0.25}  # two of four clients, or one


def never(done: Run) -> list[int]:
    picked = {client for record in done.rounds() for client in record.cohort}
    return sorted(set(range(4)) - picked)


def test_a_client_that_was_never_picked_answers_with_the_first_class(settings: Any) -> None:
    done = run(settings(federation=FEW))
    one_class = 1 / 5  # the tiny set has five classes with equally many images
    results = done.reader.evaluations(2)
    assert never(done)
    for client in never(done):
        assert results[client]["correct"] / results[client]["samples"] == pytest.approx(one_class)


def test_figures_of_picked_clients_come_beside_those_of_all(settings: Any) -> None:
    done = run(settings(federation=FEW))
    summary = done.rounds()[-1].summary
    assert summary is not None
    accuracies = {
        client: result["correct"] / result["samples"] for client, result in done.reader.evaluations(2).items()
    }
    picked = [accuracy for client, accuracy in accuracies.items() if client not in never(done)]
    assert summary["never_picked"] == len(never(done))
    assert summary["picked_average"] == pytest.approx(sum(picked) / len(picked))
    assert summary["picked_worst"] == min(picked)
    assert is_summary(summary)
    rows = comparison([done])
    assert [column.title for column in comparison_table.columns(rows)][-2:] == ["Picked", "Picked worst"]
    assert comparison_table.PICKED_EXPLANATION in markdown([Task("", tuple(rows))])


def test_fitting_gives_never_picked_clients_a_head_and_leaves_all_else_as_it_is(settings: Any) -> None:
    plain = run(settings(name="plain", federation=FEW))
    fitted = run(settings(name="fitted", federation={**FEW, "never_picked": "fit"}))
    assert plain.reader.server_state() == fitted.reader.server_state()
    before, after = plain.reader.evaluations(2), fitted.reader.evaluations(2)
    for client in range(4):
        if client in never(plain):
            assert before[client]["nll"] == pytest.approx(before[client]["samples"] * math.log(5))  # all classes alike
            assert abs(after[client]["nll"] - before[client]["nll"]) > 0.01
            assert fitted.reader.client_state(client) is None
        else:
            assert after[client] == before[client]
    assert notes(comparison([fitted])) == [
        "Clients that were never picked fit their local head before they are evaluated: fedvpt"
    ]


@pytest.mark.parametrize("name", ["pfedpg", "sgpt", "fedpr", "pfedbayespt"])
def test_every_method_with_a_local_head_can_fit_it(settings: Any, name: str) -> None:
    done = run(settings(method={"name": name}, federation={**FEW, "rounds": 1, "never_picked": "fit"}))
    assert len(done.reader.evaluations(1)) == 4


def test_with_a_shared_head_or_all_clients_picked_there_is_nothing_to_tell_apart(settings: Any) -> None:
    shared = run(settings(name="shared", method={"name": "fedvpt", "head": "shared"}, federation=FEW))
    everyone = run(settings(name="everyone"))
    for done in (shared, everyone):
        assert "picked_average" not in (done.rounds()[-1].summary or {})
        assert comparison_table.all_columns(comparison([done])) == comparison_table.COLUMNS


def test_a_resumed_run_remembers_who_was_picked(settings: Any) -> None:
    assert sample_cohort(0, 1, range(4), 0.25) != sample_cohort(0, 2, range(4), 0.25)
    whole = run(settings(name="whole", federation=FEW))
    with pytest.raises(Stopped):
        run(settings(name="stopped", federation=FEW), observer=StopAfter(1))
    assert content(run(settings(name="stopped", federation=FEW), resume=True)) == content(whole)


def test_rounds_in_which_all_were_picked_count_with_their_plain_figures() -> None:
    good, bad = ClientResult(10, 8), ClientResult(10, 0)
    early = {**summarise([good, bad], [good]), "round": 1}
    late = {**summarise([good, good], [good, good]), "round": 2}
    found = conclude([early, late], 2)
    assert found["picked_worst"] == pytest.approx(0.8)
    assert found["worst"] == pytest.approx(0.4)
    assert found["never_picked"] == 0
