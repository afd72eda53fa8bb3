"""The estimate before a run: what is counted is what the run then does, and nothing of the run changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import content, experiment, run
from typer.testing import CliRunner

import fedprompt.experiment.estimate as estimate_module
import fedprompt.experiment.experiment as front_door
from fedprompt.cli import app
from fedprompt.client.client_states import ClientStates
from fedprompt.experiment.estimate import Estimate, _Probe, may_be_long
from fedprompt.federation.observer import Observer

pytestmark = pytest.mark.unit

RAGGED = {"scheme": "dirichlet", "alpha": 1.0, "clients": 5, "min_train": 3}


def runtime_of(settings: Any) -> Any:
    factory = experiment(settings).factory
    source, manifest, backbone, world = factory.prepare()
    bank = factory.bank(source, manifest, backbone)
    return factory.config, factory.client_runtime(source, world, bank, ClientStates(lambda client: None))


@pytest.mark.parametrize("method", ["fedvpt", "sgpt", "pfedbayespt", "head_tune", "promptfl"])
def test_bytes_and_evaluations_are_those_of_the_run(method: str, settings: Any) -> None:
    name = "tiny-clip" if method == "promptfl" else "tiny"
    changed = {"partition": RAGGED, "method": {"name": method}, "backbone": {"name": name}}
    asked = settings(federation={"rounds": 4, "evaluate_every": 3, "evaluate_last": 1, "fraction": 0.6}, **changed)
    expected = experiment(asked).estimate()
    records = run(asked).rounds()[1:]
    assert {record.bytes_down for record in records} == {expected.bytes_down}
    assert {record.bytes_up for record in records} == {expected.bytes_up}
    assert expected.evaluations == sum(record.summary is not None for record in records)
    assert expected.rounds == len(records)
    assert expected.training > 0
    assert expected.evaluation > 0
    assert expected.megabytes is None or expected.megabytes > 50


@pytest.mark.parametrize("method", ["fedvpt", "sgpt"])
def test_the_steps_of_all_clients_are_counted_without_visiting_them(method: str, settings: Any) -> None:
    """SGPT has stages with limits on their steps."""
    asked = settings(partition=RAGGED, method={"name": method}, train={"batch_size": 2, "epochs": 3})
    config, runtime = runtime_of(asked)
    probe = _Probe(config, runtime, [0])
    for stage in runtime.method.stages(runtime.world, config.train):
        exact = sum(
            runtime.training.steps((stage,), runtime.bank.images(client, "train"), client) for client in range(5)
        )
        assert probe.steps(stage, range(5), 1.0) == exact
        assert probe.steps(stage, range(5), 0.5) == exact / 2


def test_a_run_after_an_estimate_has_the_same_bits(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Notes(Observer):
        def __init__(self) -> None:
            self.said: list[str] = []

        def noted(self, sentence: str) -> None:
            self.said.append(sentence)

    asked = {"partition": RAGGED, "method": {"name": "pfedbayespt"}}
    plain = content(run(settings(name="plain", **asked)))
    monkeypatch.setattr(front_door, "may_be_long", lambda config, runtime: True)
    monkeypatch.setattr(front_door, "WORTH_SAYING", 0.0)
    notes = Notes()
    assert content(run(settings(name="told", **asked), observer=notes)) == plain
    assert any("of training in a round" in sentence for sentence in notes.said)


def test_features_that_are_computed_already_are_not_waited_for_again(settings: Any) -> None:
    asked = settings(partition=RAGGED, method={"name": "head_tune"})
    run(asked)
    assert experiment(asked).estimate().features == 0.0


def test_augmented_images_are_no_features_to_wait_for_once_and_the_estimate_says_so(settings: Any) -> None:
    asked = {"partition": RAGGED, "method": {"name": "head_tune"}}
    plain, changed = (runtime_of(settings(**asked, train=train)) for train in ({}, {"random_flip": 0.5}))
    images = {name: runtime.bank.sizes("train").sum() for name, (_, runtime) in (("plain", plain), ("new", changed))}
    waited = {}
    for name, (config, runtime) in (("plain", plain), ("new", changed)):
        probe = _Probe(config, runtime, [0])
        for stage in runtime.method.stages(runtime.world, config.train):
            probe.step(stage)
        waited[name] = sum(map(len, (each for lists in probe._names.values() for each in lists)))
    assert waited == {"plain": images["plain"], "new": 0}
    told = "those of augmented images in every step"
    assert told in estimate_module.estimate(*changed, [0]).sentence()
    assert told not in estimate_module.estimate(*plain, [0]).sentence()


def test_a_short_run_is_not_estimated(settings: Any) -> None:
    assert not may_be_long(*runtime_of(settings()))
    assert may_be_long(*runtime_of(settings(federation={"rounds": 100_000}, train={"epochs": 100})))


def test_the_total_is_that_of_all_rounds_and_evaluations() -> None:
    found = Estimate(10, 4, features=30.0, training=6.0, evaluation=5.0, megabytes=512.0, bytes_down=1500, bytes_up=900)
    assert found.total == 30 + 60 + 20
    assert "about 1:50 in 10 rounds" in found.sentence()
    assert "1.5 kB down and 900 B up" in found.sentence()


def test_a_system_that_does_not_tell_its_memory_leaves_it_out(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.setattr(estimate_module, "resource", None)
    found = experiment(settings()).estimate()
    assert found.megabytes is None
    assert "of memory" not in found.sentence()


def test_the_command_trains_nothing(settings: Any, tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(settings(name="only-asked")), encoding="utf-8")
    done = CliRunner().invoke(app, ["run", str(path), "--estimate", "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    assert found["total"] > 0
    assert not list(tmp_path.rglob("run.db"))


def test_clients_that_are_elsewhere_cannot_be_measured(settings: Any, tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(settings(engine={"kind": "flower-simulation"})), encoding="utf-8")
    done = CliRunner().invoke(app, ["run", str(path), "--estimate"])
    assert isinstance(done.exception, Exception)
    assert "engine.kind must be in-process" in str(done.exception)
