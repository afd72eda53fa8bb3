"""New clients: fitted to labelled images, refused where these do not fit the run, kept and used again."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from remote_run import tiny_settings
from support import run

from fedprompt.core import wire
from fedprompt.core.client_sampling import sample_newcomers
from fedprompt.data.partition.export_clients import export_clients
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import ConfigError, DataError, RunError
from fedprompt.inference.adapt import adapt, labelled_images, load, save
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def newcomer(opened: LoadedRun, files: dict[str, Path]) -> TrainedClient:
    return adapt(opened, files["client_0"], epochs=2)


def folder_of(root: Path, places: range, names: dict[str, str] | None = None) -> Path:
    """Images of the tiny set as class/image, some classes under another name."""
    source = TinySource()
    for place in places:
        name = source.class_names[source.labels[place]]
        target = root / (names or {}).get(name, name) / f"{place:04}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        source.image(place).save(target)
    return root


def accuracy(client: TrainedClient, file: Path) -> float:
    source = ParquetSource(file, file.parent)
    test = np.flatnonzero(source.splits == "test")
    found = client.probabilities([source.image(int(index)) for index in test]).argmax(1)
    names = [client.class_names[place] for place in found.tolist()]
    return float(
        np.mean([name == source.class_names[label] for name, label in zip(names, source.labels[test], strict=True)])
    )


def test_a_held_out_client_gets_from_its_images_what_the_federation_gave_it(
    files: dict[str, Path], tmp_path: Path
) -> None:
    """The file holds its test images, too: those for training count, in the client's own order."""
    federation = {"rounds": 2, "held_out": 0.25, "newcomer_epochs": 3}
    opened = LoadedRun.open(run(tiny_settings(tmp_path, "held-out", federation=federation)))
    (held,) = sample_newcomers(0, 4, 0.25)
    name = opened.world.client_names[held]
    client = adapt(opened, files[name], name)
    theirs = opened.fitted(held, opened.bank(), opened.states())
    assert client.params.keys() == theirs.keys()
    assert all(torch.equal(client.params[key], theirs[key]) for key in theirs)
    stored = opened.run.evaluations(2)[held]
    assert accuracy(client, files[name]) == stored["correct"] / stored["samples"]


def test_adapting_helps(tmp_path: Path) -> None:
    data = {"source": "tiny", "train_per_cell": 12, "test_per_cell": 6}
    federation, train = {"rounds": 1}, {"lr": 0.1, "batch_size": 8, "momentum": 0.9}
    opened = LoadedRun.open(run(tiny_settings(tmp_path, "a", data=data, federation=federation, train=train)))
    source = open_source(opened.config.data, opened.factory.cache)
    own = export_clients(source, opened.run.manifest(), tmp_path / "files")[0]
    before, after = (accuracy(adapt(opened, own, epochs=epochs), own) for epochs in (0, 30))
    assert after >= before + 0.2


def test_more_epochs_are_more_steps(opened: LoadedRun, files: dict[str, Path], newcomer: TrainedClient) -> None:
    still = adapt(opened, files["client_0"], epochs=0)
    changed = {name for name in newcomer.params if not torch.equal(newcomer.params[name], still.params[name])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.parametrize("epochs", [None, 5])
def test_the_run_says_how_long_unless_told_otherwise(
    epochs: int | None, opened: LoadedRun, files: dict[str, Path]
) -> None:
    assert opened.config.federation.newcomer_epochs == 5
    found, five = adapt(opened, files["client_0"], epochs=epochs), adapt(opened, files["client_0"], epochs=5)
    assert torch.equal(found.params["head.weight"], five.params["head.weight"])


# -- whose images -----------------------------------------------------------------------------------------------------


def test_a_folder_may_lack_classes_and_labels_count_those_of_the_run(opened: LoadedRun, tmp_path: Path) -> None:
    source = TinySource()
    few = [place for place in range(len(source)) if source.class_names[source.labels[place]] in ("bars", "cross")]
    root = folder_of(tmp_path / "few", range(min(few), min(few) + 60))
    labelled = labelled_images(root, opened)
    assert labelled.class_names == opened.world.class_names
    names = [labelled.class_names[label] for label in labelled.labels]
    assert sorted(set(names)) == sorted(each.name for each in root.iterdir())


def test_a_class_the_run_does_not_have_is_refused_with_the_one_that_may_be_meant(
    opened: LoadedRun, tmp_path: Path
) -> None:
    root = folder_of(tmp_path / "set", range(0, 300, 7), {"disc": "Disc"})
    told = r"class names must be among those of the run, got 'Disc' \(did you mean 'disc'\?\)"
    with pytest.raises(DataError, match=told):
        adapt(opened, root)


def test_images_that_are_not_there_are_named(opened: LoadedRun, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"labelled images must be .* an existing path, got .*nowhere"):
        adapt(opened, tmp_path / "nowhere")


def test_a_client_that_trained_has_nothing_to_adapt(opened: LoadedRun, files: dict[str, Path]) -> None:
    told = r"must be absent for client 'client_0': it has trained, and fedvpt predicts without more images"
    with pytest.raises(ConfigError, match=told):
        adapt(opened, files["client_0"], "client_0")
    with pytest.raises(ConfigError, match=r"epochs must be absent for 'client_0': it has trained in the run, got 3"):
        adapt(opened, files["client_0"], "client_0", epochs=3)
    with pytest.raises(ConfigError, match=r"epochs must be at least 0, got -1"):
        adapt(opened, files["client_0"], epochs=-1)


def test_for_a_method_that_looks_again_the_images_stand_for_the_clients_own(
    files: dict[str, Path], tmp_path: Path
) -> None:
    opened = LoadedRun.open(run(tiny_settings(tmp_path, "ifca", method={"name": "ifca"})))
    given, own = adapt(opened, files["client_1"], "client_1"), TrainedClient.open(opened, "client_1")
    assert given.params.keys() == own.params.keys()
    assert all(torch.equal(given.params[name], own.params[name]) for name in own.params)


# -- kept -------------------------------------------------------------------------------------------------------------


def test_a_kept_client_says_the_same(newcomer: TrainedClient, opened: LoadedRun, tmp_path: Path) -> None:
    save(newcomer, tmp_path / "kept")
    images = [TinySource().image(place) for place in range(5)]
    again = load(opened.run.directory, tmp_path / "kept")
    assert torch.equal(again.predict(images).draws, newcomer.predict(images).draws)
    assert (again.name, again.index) == ("newcomer", 4)
    assert stat.S_IMODE((tmp_path / "kept" / "client.safetensors").stat().st_mode) == 0o600


def test_a_kept_client_belongs_to_its_run_as_it_is(newcomer: TrainedClient, tmp_path: Path) -> None:
    save(newcomer, tmp_path / "kept")
    other = run(tiny_settings(tmp_path, "other", federation={"rounds": 1}))
    with pytest.raises(RunError, match=r"adapted client .* must be of run .* as it is now \(config "):
        load(other, tmp_path / "kept")


def test_what_is_no_kept_client_is_refused(newcomer: TrainedClient, opened: LoadedRun, tmp_path: Path) -> None:
    kept = save(newcomer, tmp_path / "kept")
    with pytest.raises(RunError, match=r"adapted client must be a folder with client\.json and client\.safetensors"):
        load(opened, tmp_path)
    broken = shutil.copytree(kept, tmp_path / "broken")
    (broken / "client.safetensors").write_bytes(b"something else")
    with pytest.raises(RunError, match=r"is damaged: client\.safetensors is not the file that client\.json describes"):
        load(opened, broken)
    record = json.loads((kept / "client.json").read_text())
    for changes, rule in (
        ({"format": "other"}, r"format of .* must be 'fedprompt-client-1', got 'other'"),
        ({"number": 5}, r"must name a client in 0\.\.4"),
        ({"number": 1}, r"must name client 'client_1', got 'newcomer'"),
    ):
        (kept / "client.json").write_text(json.dumps({**record, **changes}))
        with pytest.raises(RunError, match=rule):
            load(opened, kept)
    (kept / "client.json").write_text("{")
    with pytest.raises(RunError, match=r"cannot be read"):
        load(opened, kept)


def test_tensors_of_another_shape_are_refused(newcomer: TrainedClient, opened: LoadedRun, tmp_path: Path) -> None:
    small = {**newcomer.params, "head.weight": newcomer.params["head.weight"][:, :3]}
    kept = save(TrainedClient(opened, newcomer.world, newcomer.index, small), tmp_path / "small")
    assert wire.decode((kept / "client.safetensors").read_bytes())["head.weight"].shape[1] == 3
    with pytest.raises(RunError, match=r"must hold the tensors fedvpt predicts with"):
        load(opened, kept)
