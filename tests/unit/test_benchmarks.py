"""The parts of the speed benchmark that decide: what is counted, what is refused, what the table says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.unit

SPEED = Path(__file__).resolve().parents[2] / "benchmarks" / "speed"
ANSWERS = """
import json, sys
for number, _ in enumerate(sys.stdin):
    print(json.dumps({"number": number}), flush=True)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The driver, imported as its own directory sees it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(SPEED))
    import bench

    yield bench
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("bench", "peers", "toy", "whole_jobs"):
            del sys.modules[name]


def test_a_target_is_met_on_the_right_side_of_its_bound(bench: ModuleType) -> None:
    assert bench.Row("", figure=3.0, target=3.0).met
    assert not bench.Row("", figure=2.99, target=3.0).met
    assert bench.Row("", figure=1.0, target=1.0, at_most=True).met
    assert not bench.Row("", figure=1.01, target=1.0, at_most=True).met
    assert bench.Row("", figure=1.0).met is None
    assert bench.Row("", target=1.0).met is None


def test_a_row_that_could_not_be_measured_says_why(bench: ModuleType) -> None:
    lines = bench.table(
        [bench.Row("a round", "1 ms", "4 ms", 4.0, target=3.0), bench.Row("b", target=4.0, why="no net")]
    )
    assert "4 x" in lines.splitlines()[2]
    assert ">= 3 x, met" in lines.splitlines()[2]
    assert "(no net)" in lines.splitlines()[3]
    assert "met" not in lines.splitlines()[3]


def test_sides_that_learned_different_things_are_not_compared(bench: ModuleType) -> None:
    bench.require_same_result([{"accuracy": 0.46}], [{"accuracy": 0.47}, {}])
    with pytest.raises(bench.Unavailable, match=r"0\.400 are right, 0\.460 of ours"):
        bench.require_same_result([{"accuracy": 0.46}], [{"accuracy": 0.46}, {"accuracy": 0.40}])


def test_workers_take_turns_and_their_first_answer_does_not_count(bench: ModuleType) -> None:
    command = [sys.executable, "-c", ANSWERS]
    found = bench.take_turns({"a": command, "b": command}, 2, {})
    assert found == {name: [{"number": 1}, {"number": 2}] for name in ("a", "b")}


def test_a_worker_that_breaks_is_told_by_its_last_words(bench: ModuleType) -> None:
    with pytest.raises(bench.Unavailable, match="no such toy"):
        bench.take_turns({"a": [sys.executable, "-c", "raise SystemExit('no such toy')"]}, 1, {})


@pytest.mark.parametrize("said", ["a warning", "[1]", "\\xff"])
def test_a_worker_that_says_something_else_is_unavailable(bench: ModuleType, said: str) -> None:
    talker = f"import sys; sys.stdin.readline(); sys.stdout.buffer.write(b'{said}\\n')"
    with pytest.raises(bench.Unavailable, match="must answer with a JSON object"):
        bench.take_turns({"a": [sys.executable, "-c", talker]}, 1, {})
    with pytest.raises(bench.Unavailable, match="must answer with a JSON object"):
        bench.printed([sys.executable, "-c", f"print({said[:9]!r})"], 60)


def test_half_a_line_is_waited_for_no_longer_than_a_whole_one(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peers

    monkeypatch.setattr(peers, "ANSWER_SECONDS", 2)
    monkeypatch.setattr(peers, "END_SECONDS", 1)
    halting = "import sys, time; print('{\"number\": 1', end='', flush=True); time.sleep(300)"
    with peers.Worker([sys.executable, "-c", halting]) as worker, pytest.raises(bench.Unavailable, match="no answer"):
        worker.ask()


def test_lines_that_come_together_are_answers_one_after_the_other(bench: ModuleType) -> None:
    import peers

    hasty = 'import sys; sys.stdin.readline(); print(\'{"number": 1}\\n{"number": 2}\', flush=True); sys.stdin.read()'
    with peers.Worker([sys.executable, "-c", hasty]) as worker:
        assert [worker.ask()["number"], worker.ask()["number"]] == [1, 2]


def test_a_worker_that_has_ended_is_told_as_silent(bench: ModuleType) -> None:
    import peers

    with peers.Worker([sys.executable, "-c", ""]) as worker:
        worker._process.wait()
        with pytest.raises(bench.Unavailable, match="gave no answer"):
            worker.ask()


def test_what_a_worker_leaves_behind_is_ended(bench: ModuleType) -> None:
    import peers

    sleeper = "import subprocess; subprocess.Popen(['sleep', '300'], stdout=2)"
    with peers.Worker([sys.executable, "-c", sleeper + ANSWERS]) as worker:
        worker.ask()
        assert len(peers.marked(worker._mark)) == 2
    assert peers.marked(worker._mark) == []


def test_the_toy_job_is_the_same_for_all_who_read_it(bench: ModuleType, tmp_path: Path) -> None:
    from toy import job

    job.write(tmp_path / "a.npz")
    job.write(tmp_path / "b.npz")
    one, other = job.read(str(tmp_path / "a.npz")), job.read(str(tmp_path / "b.npz"))
    assert one.inputs.shape == (100, 128, 32)
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.labels, other.labels)
    model = job.network()
    model.load_state_dict(job.to_modules(one.start))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(one.inputs.flatten(0, 1)), one.labels.flatten())
    assert one.score(job.from_modules(model.state_dict()))["loss"] == pytest.approx(float(expected), abs=1e-6)


def test_our_side_of_the_toy_job_still_runs_and_learns(bench: ModuleType, tmp_path: Path) -> None:
    from peers import Worker
    from toy import job

    job.write(tmp_path / "toy.npz")
    start = job.read(str(tmp_path / "toy.npz"))
    with Worker([sys.executable, str(SPEED / "toy" / "ours.py"), str(tmp_path / "toy.npz")]) as ours:
        found = ours.ask()
    assert found["accuracy"] > start.score(start.start)["accuracy"] + 0.1
    assert found["cpu"] > 0


def test_the_lines_of_a_job_compare_walls_and_say_what_is_not_compared(bench: ModuleType) -> None:
    import whole_jobs

    side = {"wall": 10.0, "cpu": 9.0, "megabytes": 500.0, "average": 0.8}
    found = {
        "cold": {**side, "wall": 20.0},
        "warm": side,
        "plain": {**side, "wall": 30.0, "cpu": 27.0},
        "flops": 5e11,
        "estimated seconds of the rounds": 9.0,
        "seconds of the rounds": 8.0,
        "seconds by phase": {"train": 5.0, "evaluate": 3.0},
        "flower": 45.0,
    }
    work = whole_jobs.Work("f", "a job", {}, "fedvpt_deep", target=2, peak=75, flower="fedvpt_deep_flower")
    warm, cold, flower, peak, needs, evaluation, error = bench.job_rows(work, found, 1e11)
    assert (warm.figure, warm.met, cold.figure, cold.target) == (3.0, True, 1.5, None)
    assert (peak.figure, peak.met) == (50.0, False)
    assert needs.figure == 3.0
    assert "500 MB" in needs.ours
    assert (error.figure, error.met) == (12.5, True)
    assert (flower.figure, evaluation.figure) == (4.5, 37.5)
    other = bench.job_rows(work, {**found, "why": "learned something else"}, 1e11)
    assert other[0].figure is None
    silent = {name: value for name, value in found.items() if name != "flower"}
    assert bench.job_rows(work, {**silent, "why flower": "no Ray"}, 1e11)[2].why == "no Ray"
    assert "learned something else" in other[0].cells()[-1]
    alone = bench.job_rows(whole_jobs.Work("h", "b", {}), {**found, "plain": None, "seconds of the rounds": 0.5}, 1e11)
    assert len(alone) == 5
    assert alone[0].why == "no plain program is written"
    assert alone[3].figure is None


def test_a_job_that_breaks_leaves_the_others_their_lines(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import whole_jobs

    def broken(work: object, *given: object) -> None:
        raise KeyError("average")

    monkeypatch.setattr(whole_jobs, "gemm_peak", lambda: 1e11)
    monkeypatch.setattr(whole_jobs, "measure", broken)
    part = bench.jobs(None, until=float("inf"))
    assert [row.why for row in part.rows] == ["'average'"] * len(whole_jobs.JOBS)


def test_no_job_begins_when_the_time_is_over(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import whole_jobs

    monkeypatch.setattr(whole_jobs, "gemm_peak", lambda: 1e11)
    monkeypatch.setattr(whole_jobs, "measure", lambda *given: pytest.fail("a job began"))
    part = bench.jobs(None, until=0.0)
    assert len(part.rows) == len(whole_jobs.JOBS)
    assert all("minutes were over" in row.why for row in part.rows)
