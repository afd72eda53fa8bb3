"""A profile accounts for every moment of a round, and leaves no other trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import StopAfter, Stopped, content
from typer.testing import CliRunner

from fedprompt.backbones.random_weights import random_vit
from fedprompt.cli import app
from fedprompt.cli.run_configs import profiled
from fedprompt.core import profiling_scope
from fedprompt.core.method import Method
from fedprompt.core.profiling_scope import scope
from fedprompt.errors import ConfigError, RunError, StorageError
from fedprompt.experiment import Experiment, profile_tables, profiling
from fedprompt.experiment.profiling import FRAMEWORK, OF_METHODS, POINTS, Profile, Round, Spent
from fedprompt.federation.loop import Federation
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.runs.run import Run
from fedprompt.runs.tables import FILE

pytestmark = pytest.mark.unit

TEXT = {"backbone": {"name": "tiny-clip"}, "method": {"name": "promptfl", "context_tokens": 2}}
METHODS = {
    "vision": {"method": {"name": "fedvpt_deep", "prompt_tokens": 2}},
    "text": TEXT,
    "statistics and a server": {"method": {"name": "pep_fedpt", "shared_tokens": 2}},
    "paused": {"method": {"name": "sgpt"}},
    "changed weights": {"method": {"name": "fedlora"}},
    "variant": {"method": {"name": "fedvpt"}, "variant": {"name": "ditto"}},
}


FEW = {"train_per_cell": 2, "test_per_cell": 1}  # operators of a round that is watched take long to list


def run(values: dict[str, Any], name: str) -> Run:
    return Experiment({**values, "name": name}).run()


class Measured(NamedTuple):
    """A profile of a run, and what that run came to with it and without."""

    profile: Profile
    with_it: str
    without: str


@pytest.fixture
def measured(settings) -> Callable[[str], Measured]:
    """Of three rounds, the second of which is watched; one for each kind, for all tests of a process that ask for it."""

    def make(kind: str) -> Measured:
        if kind not in MEASURED:
            values = settings(**METHODS[kind], data=FEW, federation={"rounds": 3})
            plain = run(values, "plain")
            with Profile() as profile:
                profiled = run(values, "profiled")
            MEASURED[kind] = Measured(profile, content(profiled), content(plain))
        return MEASURED[kind]

    return make


MEASURED: dict[str, Measured] = {}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", METHODS)
def test_results_are_the_same_to_the_bit(measured, kind):
    found = measured(kind)
    assert found.with_it == found.without


@pytest.mark.parametrize("kind", METHODS)
def test_every_moment_of_a_round_belongs_to_one_phase_and_one_place(measured, kind):
    profile = measured(kind).profile
    assert [each.number for each in profile.rounds] == [1, 2, 3]
    for each in profile.rounds:
        assert sum(spent.seconds for spent in each.spent.values()) == pytest.approx(each.seconds, rel=1e-9)
        assert min(spent.seconds for spent in each.spent.values()) >= 0
        assert {phase for phase, _ in each.spent} >= {"sample", "train", "aggregate", "evaluate", "commit"}
        assert {place for _, place in each.spent} >= {"method", "method gradients", "optimiser", "download", FRAMEWORK}
        assert each.clients == {"train": 4, "evaluate": 4}


@pytest.mark.parametrize(("kind", "tower"), [("vision", "backbone"), ("text", "text tower")])
def test_the_way_back_through_a_tower_is_told_from_the_methods_own(measured, kind, tower):
    spent = measured(kind).profile.rounds[0].spent
    assert spent["train", tower].seconds > 0
    assert spent["train", f"{tower} gradients"].calls == spent["train", "method gradients"].calls > 0


def test_images_that_no_prompt_reaches_take_no_time_in_the_backbone_twice(settings):
    values = settings(method={"name": "head_tune"}, data=FEW, federation={"rounds": 3})
    with Profile() as profile:
        run(values, "run")
    assert not any("backbone" in place for each in profile.rounds[1:] for _, place in each.spent)


@pytest.fixture
def pass_time(monkeypatch) -> Callable[[float], None]:
    """A clock that stands still until it is told to go on."""
    now = [0.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_the_seconds_of_a_place_do_not_count_those_it_called(pass_time):
    profile = Profile()
    with profile._round(1):
        pass_time(1)
        with profile.scope("train"):
            pass_time(2)
            with profile.scope("outer"):
                pass_time(4)
                with profile.scope("inner"):
                    pass_time(8)
                pass_time(16)
    (found,) = profile.rounds
    assert found.seconds == 31
    assert {key: spent.seconds for key, spent in found.spent.items()} == {
        ("between phases", FRAMEWORK): 1,
        ("train", FRAMEWORK): 2,
        ("train", "outer"): 20,
        ("train", "inner"): 8,
    }


def test_a_place_inside_itself_is_counted_once(pass_time):
    profile = Profile()
    with profile._round(1), profile.scope("train"), profile.scope("method"):
        pass_time(1)
        with profile.scope("method"):
            pass_time(2)
    assert profile.rounds[0].spent["train", "method"] == Spent(3.0, 2)


def test_an_error_closes_what_it_leaves():
    profile = Profile()
    with pytest.raises(ZeroDivisionError), profile._round(1), profile.scope("train"), profile.scope("method"):
        raise ZeroDivisionError
    assert profile._stack == []
    assert set(profile.rounds[0].spent) == {("train", "method"), ("train", FRAMEWORK), ("between phases", FRAMEWORK)}


def test_other_threads_do_not_disturb_the_account():
    profile = Profile()

    def work() -> None:
        with profile.scope("elsewhere"):
            pass

    with profile._round(1), profile.scope("train"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert ("train", "elsewhere") not in profile.rounds[0].spent


def test_a_scope_without_a_profile_is_one_and_the_same_nothing():
    assert scope("anything") is scope("else")


def test_a_scope_of_ones_own_is_a_place(settings, monkeypatch):
    original = Method.loss

    def loss(self: Method, *args: Any) -> Any:
        with scope("my loss"):
            return original(self, *args)

    monkeypatch.setattr(Method, "loss", loss)
    with Profile() as profile:
        run(settings(federation={"rounds": 1}), "run")
    assert profile.rounds[0].spent["train", "my loss"].calls > 0


def functions() -> dict[str, Any]:
    """Every function a profile may replace."""
    found = {
        f"{cls.__qualname__}.{name}": vars(cls).get(name) for cls in profiling._method_classes() for name in OF_METHODS
    }
    for module, path, _ in POINTS:
        value: Any = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        found[f"{module}.{path}"] = value
    return {**found, **{name: vars(Federation)[name] for name in ("_round", "_commit", "_downloads")}}


@pytest.mark.parametrize("fails", [False, True])
def test_every_function_is_replaced_and_put_back(fails):
    before = functions()
    with suppress(KeyboardInterrupt), Profile():
        during = functions()
        if fails:
            raise KeyboardInterrupt
    assert all(during[name] is not function for name, function in before.items() if function is not None)
    assert functions() == before


def test_two_profiles_at_once_are_refused_and_the_first_goes_on():
    with Profile():
        with pytest.raises(RuntimeError, match="one profile is on already"), Profile():
            pass
        assert profiling_scope.measuring()
    assert not profiling_scope.measuring()


def test_every_function_of_the_contract_is_known():
    """A function that joins the contract joins the profile, or is named here as one that takes no time in a run."""
    quick = {"check", "init", "mixtures"}
    declared = {name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")}
    assert declared - quick == set(OF_METHODS)


def test_hooks_leave_gradients_alone():
    vit = random_vit()
    tokens = vit.embed(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    prompt = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def gradient() -> torch.Tensor:
        seen = vit.run(tokens, [TokenPrompt(prompt, (0,))])["cls"]
        return torch.autograd.grad(seen.square().sum(), prompt)[0]

    plain = gradient()
    with Profile() as profile, profile._round(1), scope("train"):
        watched = gradient()
    assert torch.equal(plain, watched)
    assert profile.rounds[0].spent["train", "backbone gradients"].calls == 1


# what is told


def two_rounds() -> Profile:
    profile = Profile()
    spent = {
        ("train", "backbone"): Spent(3.0, 5),
        ("train", "backbone gradients"): Spent(2.0, 5),
        ("train", "method"): Spent(1.0, 20),
        ("evaluate", "features"): Spent(0.5, 2),
        ("evaluate", "decode"): Spent(0.5, 2),
        ("commit", FRAMEWORK): Spent(1.0, 1),
    }
    profile.rounds = [
        Round(1, 8.0, spent, {"train": 4, "evaluate": 2}),
        Round(2, 80.0, {("train", "method"): Spent(80.0, 1)}, {"train": 4, "evaluate": 0}, watched=True),
    ]
    return profile


def test_shares_and_clients_are_those_of_the_rounds_nobody_slowed_down():
    found = profile_tables.as_json(two_rounds())
    assert found["seconds"] == 8.0
    assert found["rounds_counted"] == [1]
    assert found["shares"] == {
        "frozen backbone": 5 / 8,
        "method": 1 / 8,
        "images and features": 1 / 8,
        "framework": 1 / 8,
    }
    assert found["per_client"] == {"train": 6 / 4, "evaluate": 1 / 2}
    assert found["phases"]["train"] == {"seconds": 6.0, "calls": 30}
    assert [each["seconds"] for each in found["rounds"]] == [8.0, 80.0]
    assert found["rounds"][1]["watched"]


def test_a_watched_round_counts_where_there_is_no_other():
    profile = two_rounds()
    del profile.rounds[0]
    assert profile_tables.as_json(profile)["rounds_counted"] == [2]


def test_nothing_was_measured_is_told_too():
    assert profile_tables.as_json(Profile())["rounds"] == []
    assert profile_tables.tables(Profile()) == []


# on the command line


@pytest.fixture
def config(settings, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(settings(data=FEW, federation={"rounds": 3})))
    return path


def test_the_command_line_writes_a_profile_beside_the_run_file(config, tmp_path):
    result = CliRunner().invoke(app, ["run", str(config), "--profile", "--trace", "--quiet"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "round by round" in result.output
    (directory,) = (tmp_path / "runs").iterdir()
    found = json.loads((directory / profile_tables.FILE).read_text())
    assert [each["round"] for each in found["rounds"]] == [1, 2, 3]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["operators"]["round"] == 2
    assert any(each["name"] == "aten::addmm" for each in found["operators"]["longest"])
    assert json.loads((directory / profile_tables.TRACE).read_text())["traceEvents"]


def test_json_output_stays_json(config):
    result = CliRunner().invoke(app, ["run", str(config), "--profile", "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)


def test_without_the_flag_nothing_is_written(config, tmp_path):
    CliRunner().invoke(app, ["run", str(config), "--quiet"], catch_exceptions=False)
    (directory,) = (tmp_path / "runs").iterdir()
    assert (directory / FILE).is_file()
    assert not (directory / profile_tables.FILE).exists()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second round, the one that is watched, before it is committed."""
    commit = Federation._commit

    def stopped(federation: Federation, server: Any, record: Any, *rest: Any) -> Any:
        if record.round == 2:
            raise KeyboardInterrupt
        return commit(federation, server, record, *rest)

    monkeypatch.setattr(Federation, "_commit", stopped)


def test_a_round_that_was_not_finished_does_not_count(config, tmp_path, interrupted):
    CliRunner().invoke(app, ["run", str(config), "--quiet", "--profile", "--trace"])
    (directory,) = (tmp_path / "runs").iterdir()
    found = json.loads((directory / profile_tables.FILE).read_text())
    assert [each["round"] for each in found["rounds"]] == found["rounds_counted"] == [1]
    assert found["operators"] == {"round": None, "longest": []}


def test_a_profile_that_cannot_be_written_does_not_hide_what_stopped_the_run(tmp_path, monkeypatch, capsys, settings):
    def full(*_: object) -> Path:
        raise StorageError("the disk is full")

    monkeypatch.setattr(profile_tables, "save", full)
    with pytest.raises(Stopped), profiled(tmp_path, trace=False, as_json=False):
        Experiment(settings(data=FEW, federation={"rounds": 3})).run(observer=StopAfter(2))
    assert "profile: not written: the disk is full" in capsys.readouterr().err
    with pytest.raises(StorageError), profiled(tmp_path, trace=False, as_json=False):
        run(settings(federation={"rounds": 1}), "another")


def test_a_trace_without_a_profile_is_refused(config):
    with pytest.raises(ConfigError, match="--trace must come with --profile"):
        CliRunner().invoke(app, ["run", str(config), "--trace"], catch_exceptions=False)


def test_a_run_that_is_refused_has_no_profile(config, tmp_path):
    CliRunner().invoke(app, ["run", str(config), "--quiet"], catch_exceptions=False)
    with pytest.raises(RunError, match="exists already"):
        CliRunner().invoke(app, ["run", str(config), "--quiet", "--profile"], catch_exceptions=False)
    (directory,) = (tmp_path / "runs").iterdir()
    assert not (directory / profile_tables.FILE).exists()
