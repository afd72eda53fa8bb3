"""What a person sees while a run trains."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from support import StopAfter, Stopped, run

from fedprompt.config import parse
from fedprompt.experiment.pace import Pace, as_time
from fedprompt.experiment.progress import LiveProgress
from fedprompt.federation.observer import Observer
from fedprompt.report.comparison_table import cells, columns, comparison, header
from fedprompt.runs.store import RoundRecord

pytestmark = pytest.mark.unit


class Watching:
    """A progress display without a terminal, and a clock that a test moves."""

    def __init__(self, rounds: int = 10, clients: int = 6) -> None:
        self.time, self.paper = 0.0, io.StringIO()
        self.display = LiveProgress(Console(file=self.paper, width=200), lambda: self.time)
        names = [f"client_{number}" for number in range(clients)]
        self.display.started(parse({"federation": {"rounds": rounds}}), names, 0)
        self.display.cohort(1, range(clients))
        self.clients = clients

    def steps(self, count: int, of: int, seconds: float) -> None:
        for step in range(1, count + 1):
            self.time += seconds
            self.display.stepped("training", self.clients, step / of)

    @property
    def lines(self) -> list[str]:
        return self.paper.getvalue().splitlines()[1:]  # the first one names the run


def test_the_time_of_all_rounds_is_said_after_the_second_step_of_the_first() -> None:
    watching = Watching()
    watching.steps(2, 20, 2.0)
    assert watching.lines == ["  about 0:40 of training in a round, 6:40 in 10 rounds; evaluations come on top"]


def test_of_a_run_of_less_than_a_minute_nothing_is_said() -> None:
    watching = Watching(rounds=2)
    watching.steps(10, 20, 1.0)
    assert watching.lines == []


def test_one_long_step_is_enough_for_an_estimate() -> None:
    watching = Watching()
    watching.steps(1, 10, 30.0)
    assert watching.lines[0] == "  about 5:00 of training in a round, 50:00 in 10 rounds; evaluations come on top"


def test_without_a_terminal_a_line_tells_every_15_seconds_how_far_a_round_is() -> None:
    watching = Watching()
    watching.steps(20, 20, 2.0)
    assert watching.lines[1:] == [
        "  round 1/10: training 6 clients, 40 % done, about 0:24 left",
        "  round 1/10: training 6 clients, 80 % done, about 0:08 left",
    ]


def test_a_long_evaluation_shows_that_it_moves() -> None:
    watching = Watching()
    for step in range(1, 11):
        watching.time += 2.0
        watching.display.stepped("testing", 6, step / 10)
    assert watching.lines == ["  round 1/10: testing 6 clients, 80 % done"]


def test_a_survey_before_the_first_round_shows_that_it_moves() -> None:
    watching = Watching(clients=4)
    for done in (1, 2, 3):
        watching.time += 8.0
        watching.display.surveyed(done, 4)
    assert watching.lines == ["  before round 1: surveying 4 clients, 50 % done, about 0:16 left"]


def test_the_first_step_does_not_count_for_the_others() -> None:
    """It loads what later ones find in memory."""
    pace = Pace(0.0)
    assert pace.whole() is None
    pace.reached(0.1, 8.0)
    assert pace.whole() is None
    pace.reached(0.2, 9.0)
    assert pace.whole() == pytest.approx(10.0)
    pace.reached(0.1, 20.0)
    assert pace.share == 0.2


def test_times_are_minutes_and_seconds() -> None:
    assert [as_time(seconds) for seconds in (0, 59.9, 61, 3600)] == ["0:00", "1:00", "1:01", "60:00"]


class Shares(Observer):
    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def stepped(self, doing: str, clients: int, share: float) -> None:
        self.seen.setdefault(f"{doing} {clients}", []).append(share)


@pytest.mark.parametrize("cohort", [1, 4])
def test_a_run_in_process_tells_every_step_of_training_and_testing(settings: Any, cohort: int) -> None:
    seen = Shares()
    run(settings(federation={"rounds": 1}, train={"epochs": 2}, engine={"cohort": cohort}), observer=seen)
    assert set(seen.seen) == {f"training {cohort}", f"testing {cohort}"}
    for shares in seen.seen.values():
        assert shares[-1] == 1.0
        assert cohort == 1 or shares == sorted(shares)
    assert len(seen.seen[f"training {cohort}"]) > 1


def shown(settings: Any, rounds: int, last: int | str, **more: Any) -> tuple[str, dict[str, str]]:
    """The last line of the progress, and the row of the table below it."""
    paper = io.StringIO()
    values = settings(name=f"r{last}", federation={"rounds": rounds, "evaluate_last": last}, train={"lr": 0.5})
    done = run(values, observer=LiveProgress(Console(file=paper, width=200)), **more)
    rows = comparison([done])
    table = dict(zip(header(columns(rows)), (cell.text for cell in cells(rows, columns(rows))[0]), strict=True))
    return paper.getvalue().splitlines()[-1], table


@pytest.mark.parametrize("last", [1, 3, "auto"])
def test_the_last_line_of_the_progress_and_the_table_agree_in_names_and_numbers(settings: Any, last: int | str) -> None:
    line, table = shown(settings, 9, last)
    assert line.startswith("  done: ")
    said = dict(re.findall(r"(\w[\w ]*(?: \([^)]*\))?) ([\d.]+) %", line.removeprefix("  done: ")))
    names = {name for name in table if name.startswith(("Average", "Worst Local"))}
    assert said == {name: table[name] for name in names}
    assert len(said) == (2 if last == 1 else 4)


def test_a_run_that_is_resumed_concludes_from_all_its_rounds(settings: Any) -> None:
    values = settings(name="r3", federation={"rounds": 9, "evaluate_last": 3}, train={"lr": 0.5})
    with pytest.raises(Stopped):
        run(values, observer=StopAfter(8))
    line, table = shown(settings, 9, 3, resume=True)
    assert f"Average (mean of last 3) {table['Average (mean of last 3)']} %" in line


def test_a_round_says_its_own_average(settings: Any) -> None:
    watching = Watching()
    watching.display.committed(RoundRecord(1, [0], 0.5, 0, 0, {"average": 0.5, "worst": 0.25}))
    assert "Average 50.00 %  Worst Local 25.00 %" in watching.lines[-1]
