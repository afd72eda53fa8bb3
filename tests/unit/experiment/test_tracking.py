"""Trackers: their values are those of the run file, no step comes twice, and none of them can end a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from remote_run import SiteRecorder, exported, sites_with, tiny_settings
from support import content, run

from fedprompt.config import parse
from fedprompt.config.registries import TRACKERS
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import ConfigError
from fedprompt.experiment import Experiment, tracking
from fedprompt.experiment.sites import SitesExperiment
from fedprompt.experiment.tracking import Tracked, Tracker
from fedprompt.federation.observer import EVENTS, Observer, Several
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit


def settings(folder: Path, *trackers: str, rounds: int = 2) -> dict[str, Any]:
    values = tiny_settings(folder, "tracked", federation={"rounds": rounds})
    return {**values, "output": {**values["output"], "trackers": [*trackers]}}


class Stop(Observer):
    """Stops a run before a round."""

    def __init__(self, before: int) -> None:
        self.before = before

    def cohort(self, round: int, clients: Any) -> None:
        if round == self.before:
            raise KeyboardInterrupt


class Notes(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def noted(self, sentence: str) -> None:
        self.said.append(sentence)


class Kept(Tracker):
    """Keeps all it is given."""

    all: ClassVar[list[Kept]] = []

    def __init__(self, run: Tracked) -> None:
        self.run, self.id = run, run.id or "made"
        self.steps: dict[int, Mapping[str, float]] = {}
        self.files: list[Path] = []
        self.closed = 0
        Kept.all.append(self)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert step not in self.steps
        self.steps[step] = values

    def artifact(self, path: Path) -> None:
        self.files.append(path)

    def close(self) -> None:
        self.closed += 1


class Broken(Tracker):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("nobody is there")


REPORT = tracking.write_report
FLOAT = 1  # how TensorBoard calls single precision


def no_report(runs: Any, folder: Path) -> Any:
    """A report takes a second: one test has a real one."""
    (folder / "report.html").write_text("")
    return SimpleNamespace(html=folder / "report.html")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRACKERS, "_table", {**TRACKERS.table(), "kept": Kept, "broken": Broken})
    monkeypatch.setattr(Kept, "all", [])
    monkeypatch.setattr(tracking, "write_report", no_report)


def expected(done: Run) -> dict[str, dict[int, float]]:
    """Accuracies by tag and step, from the run file."""
    found: dict[str, dict[int, float]] = {"round/average": {}, "round/loss": {}}
    for record in done.rounds():
        if record.loss is not None:
            found["round/loss"][record.round] = record.loss
        if record.summary is not None:
            found["round/average"][record.round] = record.summary["average"]
            for client, result in done.evaluations(record.round).items():
                tag = f"client/{done.clients[client]}/accuracy"
                found.setdefault(tag, {})[record.round] = result["correct"] / result["samples"]
    return found


class TestTensorBoard:
    def read(self, done: Run) -> dict[str, list[tuple[int, float]]]:
        events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        found = events.EventAccumulator(str(done.directory / "trackers/tensorboard"), size_guidance={"tensors": 0})
        found.Reload()
        tags = [tag for tag in found.Tags()["tensors"] if tag.partition("/")[0] in ("round", "client")]
        assert {e.tensor_proto.dtype for tag in tags for e in found.Tensors(tag)} == {FLOAT}, "it shows no other kind"
        tensors = pytest.importorskip("tensorboard.util.tensor_util")
        return {
            tag: [(e.step, float(tensors.make_ndarray(e.tensor_proto))) for e in found.Tensors(tag)] for tag in tags
        }

    def test_files_have_the_values_of_the_run_file(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        done = run(settings(tmp_path, "tensorboard"))
        found = self.read(done)
        for tag, values in expected(done).items():
            assert dict(found[tag]) == pytest.approx(values, rel=1e-6)
        assert "client/client_3/accuracy" in found

    def test_a_resumed_run_repeats_no_step(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        values = settings(tmp_path, "tensorboard", rounds=3)
        with pytest.raises(KeyboardInterrupt):
            run(values, observer=Stop(before=3))
        done = run(values, resume=True)
        assert [step for step, _ in self.read(done)["round/average"]] == [1, 2, 3]
        assert [step for step, _ in self.read(done)["round/cohort"]] == [0, 1, 2, 3]


class TestAnyTracker:
    def test_gets_every_round_with_the_values_of_the_run_file(self, tmp_path: Path) -> None:
        done = run(settings(tmp_path, "kept"))
        (kept,) = Kept.all
        assert list(kept.steps) == [0, 1, 2]
        for tag, values in expected(done).items():
            assert {step: got[tag] for step, got in kept.steps.items() if tag in got} == values

    def test_gets_the_config_and_the_report(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tracking, "write_report", REPORT)
        run(settings(tmp_path, "kept"))
        (kept,) = Kept.all
        assert kept.run.config["method.prompt_tokens"] == 2
        assert [path.name for path in kept.files] == ["report.html"]
        assert kept.files[0].read_text().startswith("<!DOCTYPE html>")
        assert kept.closed == 1

    def test_goes_on_behind_its_last_step_and_finds_its_run(self, tmp_path: Path) -> None:
        values = settings(tmp_path, "kept", rounds=3)
        with pytest.raises(KeyboardInterrupt):
            run(values, observer=Stop(before=2))
        run(values, resume=True)
        first, second = Kept.all
        assert (list(first.steps), list(second.steps)) == ([0, 1], [2, 3])
        assert (first.run.id, second.run.id, second.run.next_step) == (None, "made", 2)
        assert first.closed == 1

    def test_that_was_added_later_gets_the_rounds_before(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(settings(tmp_path), observer=Stop(before=2))
        run(settings(tmp_path, "kept"), resume=True)
        assert list(Kept.all[0].steps) == [0, 1, 2]

    def test_that_fails_is_left_out_and_changes_nothing(self, tmp_path: Path) -> None:
        notes = Notes()
        done = run(settings(tmp_path / "with", "broken", "kept"), observer=notes)
        plain = run(settings(tmp_path / "without"))
        assert content(done) == content(plain)
        assert list(Kept.all[0].steps) == [0, 1, 2]
        (said,) = [line for line in notes.said if "tracker" in line]
        assert said == "tracker broken failed and gets nothing more of this run: ConnectionError: nobody is there"


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> SiteRecorder:
    ground = tmp_path_factory.mktemp("sites")
    files = exported(tiny_settings(ground, "tracked"), ground / "images")
    return SiteRecorder(sites_with(files, ground / "nodes", policy=SitePolicy()))


class TestFederationOfSites:
    """`federate run`: the server's own business, which no site hears of."""

    def federated(self, sites: SiteRecorder, values: dict[str, Any], **options: Any) -> Run:
        return SitesExperiment({**values, "engine": {"kind": "flower"}}).federate(sites, **options)

    def test_gives_its_trackers_the_values_of_the_run_file(self, tmp_path: Path, sites: SiteRecorder) -> None:
        done = self.federated(sites, settings(tmp_path, "kept", "tensorboard"))
        wanted = expected(done)
        assert "client/client_3/accuracy" in wanted
        (kept,) = Kept.all
        found = TestTensorBoard().read(done)
        for tag, values in wanted.items():
            assert {step: got[tag] for step, got in kept.steps.items() if tag in got} == values
            assert dict(found[tag]) == pytest.approx(values, rel=1e-6)
        assert kept.closed == 1
        assert not [order for _, order in sites.orders if b"tensorboard" in order], "no site hears of it"

    def test_resumed_repeats_no_step(self, tmp_path: Path, sites: SiteRecorder) -> None:
        values = settings(tmp_path, "kept", rounds=3)
        with pytest.raises(KeyboardInterrupt):
            self.federated(sites, values, observer=Stop(before=2))
        self.federated(sites, values, resume=True)
        first, second = Kept.all
        assert (list(first.steps), list(second.steps)) == ([0, 1], [2, 3])

    def test_goes_on_without_a_tracker_that_fails(self, tmp_path: Path, sites: SiteRecorder) -> None:
        notes = Notes()
        done = self.federated(sites, settings(tmp_path, "broken"), observer=notes)
        assert len(done.history()) == 2
        assert [line for line in notes.said if line.startswith("tracker broken failed")]


class TestSettings:
    def test_trackers_are_off_and_no_part_of_the_hash(self, tmp_path: Path) -> None:
        off, on = parse(settings(tmp_path)), parse(settings(tmp_path, "tensorboard"))
        assert off.output.trackers == []
        assert off.digest() == on.digest()
        assert not (run(settings(tmp_path)).directory / "trackers").exists()

    def test_an_unknown_one_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"must be one of tensorboard, mlflow, wandb.*, got 'other'"):
            Experiment(settings(tmp_path, "other"))

    def test_one_without_its_package_is_refused_before_training(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedprompt.experiment.trackers.find_spec", lambda package: None)
        rule = "output.trackers must name trackers whose package is installed, got 'mlflow': pip install mlflow-skinny"
        with pytest.raises(ConfigError, match=rule):
            Experiment(settings(tmp_path, "mlflow"))


class TestSeveralObservers:
    def test_are_told_in_their_order(self, tmp_path: Path) -> None:
        told: list[str] = []
        first, second = Observer(), Observer()
        first.committed = lambda record: told.append(f"first {record.round}")  # type: ignore[method-assign]
        second.committed = lambda record: told.append(f"second {record.round}")  # type: ignore[method-assign]
        Experiment(settings(tmp_path)).run(observer=[first, second])
        assert told == ["first 1", "second 1", "first 2", "second 2"]

    def test_get_every_event(self) -> None:
        assert all(callable(getattr(Several(Observer()), name)) for name in EVENTS)
        assert {"started", "committed", "concluded", "finished"} <= set(EVENTS)


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **things: Any) -> None:
    """A package that is installed as far as anyone can see."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(things)
    monkeypatch.setitem(__import__("sys").modules, name, module)


def test_weights_and_biases_gets_one_run_with_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(**given: Any) -> Any:
        calls.append(("init", given["id"], given["resume"]))
        return SimpleNamespace(
            id="abc",
            log=lambda values, step: calls.append((step, values.get("round/average"))),
            log_artifact=lambda path, name, type: calls.append((name, Path(path).name)),
            finish=lambda: calls.append("finish"),
        )

    fake(monkeypatch, "wandb", init=init)
    done = run(settings(tmp_path, "wandb"))
    averages = {entry["round"]: entry["average"] for entry in done.history()}
    assert calls == [
        ("init", None, "allow"),
        (0, None),
        (1, averages[1]),
        (2, averages[2]),
        ("report", "report.html"),
        "finish",
    ]
    assert json.loads((done.directory / "trackers/wandb.json").read_text()) == {"step": 2, "id": "abc"}


def test_the_file_store_of_mlflow_has_the_values_of_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = run(settings(tmp_path, "mlflow"))
    client = store.MlflowClient((done.directory / "trackers/mlflow").resolve().as_uri())
    number = json.loads((done.directory / "trackers/mlflow.json").read_text())["id"]
    for tag, values in expected(done).items():
        assert {each.step: each.value for each in client.get_metric_history(number, tag)} == values
    assert [each.path for each in client.list_artifacts(number)] == ["report.html"]


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: a log of LevelDB behind seven bytes, in blocks of 32 KiB."""
    block, place, parts = 2**15, 7, []
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_an_offline_file_of_weights_and_biases_has_the_values_of_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    done = run(settings(tmp_path, "wandb"))
    (path,) = (done.directory / "trackers").rglob("run-*.wandb")
    wanted, found, end = expected(done), {}, time.monotonic() + 30
    while not wanted.items() <= found.items() and time.monotonic() < end:  # a process of its own writes the file
        time.sleep(0.2)
        found = logged(messages, path.read_bytes())
    assert {tag: found.get(tag) for tag in wanted} == wanted


def logged(messages: Any, content: bytes) -> dict[str, dict[int, float]]:
    """The scalars of an offline file, by tag and step."""
    found: dict[str, dict[int, float]] = {}
    for message in records_of(content):
        record = messages.Record.FromString(message)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            step = int(values.pop("_step", record.history.step.num))
            for tag, value in values.items():
                if not tag.startswith("_"):
                    found.setdefault(tag, {})[step] = json.loads(value)
    return found
