"""Warnings about training that does not work: each sign, once in a run, with the setting to change."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console
from support import StopAfter, Stopped, content, experiment, run, shared_tensors

from fedprompt.core.first_step import FirstStep, Gauge, described, first_steps, odd_steps
from fedprompt.core.messages import Failure
from fedprompt.experiment.progress import LiveProgress
from fedprompt.federation.observer import Observer
from fedprompt.federation.watch import Watch, agreeing, at_chance, collapsed, moved, rising, still
from fedprompt.report.comparison_table import comparison, notes
from fedprompt.report.html_report import render
from fedprompt.runs.run import Run
from fedprompt.runs.store import WARNING, RoundRecord

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        ([1.0, 1.1, 1.2, 1.3], True),
        ([2.0, 1.0, 1.1, 1.2, 1.3], True),
        ([1.0, 1.01, 1.02, 1.03], False),  # no fifth
        ([1.0, 1.5, 1.4, 1.6], False),
        ([1.3, 1.2, 1.1, 1.0], False),
        ([1.0, 1.2, 1.4], False),
        ([402.5, 3149.7, 5878.6], True),  # far above the lowest
        ([0.01, 0.2, 0.1], False),  # small losses vary
        ([], False),
    ],
)
def test_three_rises_of_the_loss_that_make_a_fifth_are_a_sign(losses: list[float], warned: bool) -> None:
    assert (rising(losses) is not None) == warned


@pytest.mark.parametrize(
    ("accuracy", "warned"), [(0.23, True), (0.20, True), (0.10, True), (0.26, False), (0.9, False)]
)
def test_an_accuracy_within_two_standard_errors_of_guessing_is_a_sign(accuracy: float, warned: bool) -> None:
    """Five classes, 250 images: two standard errors are 5.06 points."""
    assert (at_chance(accuracy, 250, 5, 3) is not None) == warned


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("gate.weight_local", 0.995, True),
        ("gate.weight_local", 0.5, False),
        ("gate.entropy", 0.002, True),
        ("gate.entropy", 1.0, False),
        ("text.attention_share", 0.996, True),
        ("vision.attention_peak", 0.999, True),
        ("vision.attention_peak", 0.3, False),
        ("text.attention_share", 0.0, False),  # where a fusion starts
        ("class_weights.entropy", 0.998, True),
        ("class_weights.entropy", 0.6, False),
        ("anything.else", 1.0, False),
    ],
)
def test_a_part_with_all_the_weight_is_a_sign(name: str, value: float, warned: bool) -> None:
    assert (name in collapsed({name: value})) == warned


def test_a_change_is_relative_to_the_start_of_a_group() -> None:
    start = {"prompt.a": torch.tensor([3.0, 0.0]), "prompt.b": torch.tensor([4.0])}
    now = {"prompt.a": torch.tensor([3.0, 0.3]), "prompt.b": torch.tensor([4.4])}
    assert moved(now, start, ["prompt.a", "prompt.b"]) == pytest.approx(0.1)
    zero = {"prompt.b": torch.zeros(1)}
    assert moved(zero, zero, ["prompt.b"]) == 0
    assert moved(now, zero, ["prompt.b"]) == float("inf")


def test_a_group_that_moved_by_less_than_a_thousandth_stands_still() -> None:
    assert still("prompt", 0.0009, 3) is not None
    assert still("prompt", 0.0011, 3) is None


def test_draws_without_mutual_information_agree() -> None:
    assert agreeing(0.0, 1.6, 5) is not None
    assert agreeing(8e-5, 1.6, 5) is None
    assert agreeing(0.0, 0.0, 5) is None  # all are certain
    assert agreeing(None, None, 5) is None  # withheld by sites


def watch(settings: Any, rounds: int = 9, known: tuple[str, ...] = (), **changes: Any) -> tuple[Watch, Any]:
    made = experiment(settings(federation={"rounds": rounds}, **changes))
    world = made.factory.prepare().world
    return Watch(made.config, world, made.method, known=known), world


def committed(round: int, pooled: float = 0.9, loss: float = 1.0) -> RoundRecord:
    return RoundRecord(
        round, [0], loss, 0, 0, {"pooled": pooled, "diagnostics": {}, "mutual_information": 0.0, "entropy": 1.0}
    )


def test_every_warning_comes_once_and_not_before_a_third_of_the_rounds(settings: Any) -> None:
    watching, world = watch(settings, rounds=15)
    shared = {name: 2 * tensor + 1 for name, tensor in world.roles.shared.items()}
    rules = [[each.rule for each in watching.look(committed(round, 0.0), shared, 100, [])] for round in range(1, 16)]
    assert rules == [[]] * 4 + [["chance"]] + [[]] * 10


def test_a_warning_of_the_stored_run_is_not_repeated(settings: Any) -> None:
    watching, world = watch(settings, known=("chance",))
    shared = {name: tensor + 1 for name, tensor in world.roles.shared.items()}
    assert watching.look(committed(5, 0.0), shared, 100, []) == []


def test_shared_groups_that_did_not_move_are_named_unless_their_rate_is_zero(settings: Any) -> None:
    watching, world = watch(settings)
    assert [each.rule for each in watching.look(committed(3), world.roles.shared, 100, [])] == ["still prompt"]
    watching, world = watch(settings, train={"lrs": {"prompt*": 0.0}})
    assert watching.look(committed(3), world.roles.shared, 100, []) == []


def test_clients_that_diverged_are_a_sign_at_once_unless_they_are_malicious(settings: Any) -> None:
    refused = [Failure(0, "finite", "training loss must be finite"), Failure(1, "norm", "too long")]
    watching, world = watch(settings)
    found = watching.look(committed(1), world.roles.shared, 100, refused)
    assert [(each.rule, each.text) for each in found] == [
        ("diverged", "training of 1 clients diverged: try a smaller train.lr, or train.clip_norm")
    ]
    watching, world = watch(settings, attack={"kind": "nan"})
    assert watching.look(committed(1), world.roles.shared, 100, refused) == []


def test_only_a_method_with_several_draws_is_asked_for_their_agreement(settings: Any) -> None:
    for name, expected in (("fedvpt", []), ("pfedbayespt", ["draws"])):
        watching, world = watch(settings, rounds=30, method={"name": name})
        assert [each.rule for each in watching.look(committed(3), world.roles.shared, 100, [])] == expected


STILL = {"train": {"lr": 1e-9}, "federation": {"rounds": 4}}


def warnings(done: Run) -> list[tuple[int, str]]:
    return [(round, detail) for round, _, kind, detail in done.reader.events() if kind == WARNING]


def test_a_run_whose_prompts_do_not_move_says_so_in_progress_events_table_and_report(settings: Any) -> None:
    paper = io.StringIO()
    done = run(settings(**STILL), observer=LiveProgress(Console(file=paper, width=300)))
    found = [detail for round, detail in warnings(done) if detail.startswith("still prompt: ")]
    assert len(found) == 1
    assert "train.lrs" in found[0]
    text = found[0].removeprefix("still prompt: ")
    assert f"  WARNING: round 3: {text}" in paper.getvalue().splitlines()
    assert render([done]).count(text) == 2  # a note above the table, and the events of the run
    assert any(note.startswith("Warnings: ") and text in note for note in notes(comparison([done])))


def test_a_run_that_is_resumed_has_the_warnings_of_one_that_was_not(settings: Any) -> None:
    whole = run(settings(name="whole", **STILL))
    with pytest.raises(Stopped):
        run(settings(**STILL), observer=StopAfter(3))
    again = run(settings(**STILL), resume=True)
    assert warnings(again) == warnings(whole) != []
    assert content(again) == content(whole)


def test_a_run_that_learns_has_no_warnings(settings: Any) -> None:
    data = {"train_per_cell": 8, "test_per_cell": 4}
    done = run(
        settings(
            data=data,
            method={"name": "fedvpt", "prompt_init": "random"},
            train={"lr": 0.1, "epochs": 2},
            federation={"rounds": 6},
        )
    )
    assert done.summary()["average"] > 0.3
    assert done.warnings() == []


class Measured(Observer):
    def __init__(self) -> None:
        self.found: list[dict[str, FirstStep]] = []

    def measured(self, steps: Any) -> None:
        self.found.append(dict(steps))


def test_the_first_step_is_measured_by_group_before_clipping() -> None:
    before = {
        "head.a": torch.tensor([[3.0], [9.0]]),
        "head.b": torch.tensor([[4.0], [9.0]]),
        "prompt": torch.zeros(2, 1),
    }
    slopes = {
        "head.a": torch.tensor([[6.0], [0.0]]),
        "head.b": torch.tensor([[8.0], [0.0]]),
        "prompt": torch.ones(2, 1),
    }
    stepped = {name: before[name] - 0.1 * slopes[name] for name in before}
    found = first_steps(before, slopes, stepped)
    assert found == {
        "head": FirstStep(10.0, 5.0, pytest.approx(1.0)),
        "prompt": FirstStep(1.0, 0.0, pytest.approx(0.1)),
    }
    assert described(found) == "first gradients: head 10 (norm 5), prompt 1 (norm 0)"
    assert odd_steps(found, warming=False) == []


def test_a_first_step_longer_than_the_tensors_or_next_to_nothing_is_a_sign() -> None:
    steps = {
        "a": FirstStep(1, 1, 3.0),
        "b": FirstStep(1, 1, 1e-7),
        "c": FirstStep(1, 0, 5.0),
        "d": FirstStep(1, 1, 0.1),
    }
    long, short = odd_steps(steps, warming=False)
    assert (
        long
        == "the first step of a is 3 times as long as the tensors themselves: try a smaller rate of `a*` in train.lrs"
    )
    assert short.startswith("the first step of b is only 1e-07 of the length")
    assert odd_steps(steps, warming=True) == [long]


def test_a_run_tells_the_size_of_its_first_gradients_once_and_computes_the_same(settings: Any) -> None:
    seen = Measured()
    done = run(settings(name="seen", federation={"rounds": 2}), observer=seen)
    (found,) = seen.found
    assert set(found) == {"prompt", "head"}
    assert all(each.gradient > 0 for each in found.values())
    assert found["head"].step == pytest.approx(0.05 * found["head"].gradient, rel=1e-4)
    assert (found["head"].tensors, found["prompt"].tensors > 0) == (0, True)
    alone = run(settings(name="alone", federation={"rounds": 2}))
    assert content(done) == content(alone)
    assert all(torch.equal(value, shared_tensors(alone)[name]) for name, value in shared_tensors(done).items())


def test_a_group_behind_a_head_of_zeros_is_measured_in_the_step_in_which_it_has_a_gradient() -> None:
    told: list[Any] = []
    gauge = Gauge(lambda found: told.append(dict(found)))
    one, none = torch.ones(1, 1), torch.zeros(1, 1)
    before = {"head": none, "prompt": 2 * one}
    gauge.add(before, {"head": one, "prompt": none}, {"head": one, "prompt": 2 * one}, last=False)
    assert told == []
    gauge.add(before, {"head": 9 * one, "prompt": 3 * one}, {"head": one, "prompt": one}, last=False)
    assert told == [{"head": FirstStep(1.0, 0.0, 1.0), "prompt": FirstStep(3.0, 2.0, 1.0)}]
    gauge.add(before, {"head": one, "prompt": one}, before, last=True)
    assert len(told) == 1


def test_a_group_without_gradients_is_told_after_five_steps_and_is_no_short_step() -> None:
    told: list[Any] = []
    gauge = Gauge(lambda found: told.append(dict(found)))
    one = torch.ones(1, 1)
    for _ in range(7):
        gauge.add({"gate": one}, {"gate": 0 * one}, {"gate": one}, last=False)
    assert told == [{"gate": FirstStep(0.0, 1.0, 0.0)}]
    assert odd_steps(told[0], warming=False) == []


@pytest.mark.parametrize("secret", [{"privacy": {"noise": 1.0}}, {"federation": {"secure_sum": True, "rounds": 1}}])
def test_gradients_of_private_clients_are_not_shown(settings: Any, secret: dict[str, Any]) -> None:
    seen = Measured()
    run(settings(**{"federation": {"rounds": 1}, "method": {"name": "fedvpt"}, **secret}), observer=seen)
    assert seen.found == []


def test_quiet_commands_also_print_warnings(settings: Any, tmp_path: Any, capsys: Any) -> None:
    from fedprompt.cli.run_configs import launch
    from fedprompt.config import parse

    launch([parse(settings(**STILL))], resume=False, quiet=True, as_json=True)
    printed = capsys.readouterr()
    assert "WARNING: tiny-fedvpt-seed0: round 3: the shared prompt moved by" in printed.err
    assert json.loads(printed.out)
