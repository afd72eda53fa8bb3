"""A client after its run: what it takes to open one, and what it says of images. For every method: tests/matrix/test_inference.py."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forgery import forged
from PIL import Image
from remote_run import SiteRecorder, run_remotely, sites_with, tiny_settings
from support import StopAfter, Stopped, run

import fedprompt
from fedprompt.data.cache.pixel_store import resized
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import BackboneError, ConfigError, DataError, RunError
from fedprompt.experiment.sites import SitesExperiment
from fedprompt.inference.adapt import adapt
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import Prediction, TrainedClient, text
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit

CLASSES = ["disc", "square", "triangle", "cross", "bars"]


def correct(client: TrainedClient, file: Path) -> int:
    """How many test images of a client's file it gets right."""
    source = ParquetSource(file, file.parent)
    test = np.flatnonzero(source.splits == "test")
    found = client.probabilities([source.image(int(index)) for index in test]).argmax(1)
    said = [client.class_names[place] for place in found.tolist()]
    return sum(name == source.class_names[label] for name, label in zip(said, source.labels[test], strict=True))


def assert_reproduced(opened: LoadedRun, files: dict[str, Path], **options: Any) -> None:
    stored = opened.run.evaluations(opened.round)
    assert len(stored) == 4
    for number, name in enumerate(opened.world.client_names):
        assert correct(TrainedClient.open(opened, name, **options), files[name]) == stored[number]["correct"]


# -- what it needs ----------------------------------------------------------------------------------------------------


def test_run_file_and_weights_are_enough(files: dict[str, Path], tmp_path: Path) -> None:
    images = shutil.copy(files["client_0"], tmp_path / "images.parquet")
    data = {"source": str(images)}
    done = run(tiny_settings(tmp_path / "runs", "gone", data=data, partition={"scheme": "iid", "clients": 2}))
    before = TrainedClient.open(done, 1).probabilities([TinySource().image(0)])
    Path(images).unlink()
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(done.directory / "run.db", tmp_path / "elsewhere" / "run.db")
    client = fedprompt.TrainedClient.open(tmp_path / "elsewhere", "client_1")
    assert torch.equal(client.probabilities([TinySource().image(0)]), before)


def test_a_method_that_looks_at_training_images_says_so_when_they_are_gone(
    files: dict[str, Path], tmp_path: Path
) -> None:
    images = shutil.copy(files["client_0"], tmp_path / "images.parquet")
    values = tiny_settings(tmp_path, "gone", data={"source": str(images)}, method={"name": "ifca"})
    done = run({**values, "partition": {"scheme": "iid", "clients": 2}})
    shutil.copy(files["client_1"], images)
    with pytest.raises(DataError, match=r"manifest\.source\.fingerprint must be that of data\.source"):
        TrainedClient.open(done, 0, trust_config=True)
    Path(images).unlink()
    rule = r"ifca reads a client's training images before it predicts, but data\.source must be"
    with pytest.raises(DataError, match=rule):
        TrainedClient.open(done, 0, trust_config=True)


def test_other_weights_are_refused(finished: Run) -> None:
    with pytest.raises(BackboneError, match=r"weights of the backbone must be those that run .* was trained with"):
        TrainedClient.open(finished, 0, weights="tiny-clip")


def test_a_run_without_a_round_is_refused(finished: Run, tmp_path: Path) -> None:
    shutil.copy(finished.directory / "run.db", tmp_path / "run.db")
    with forged(tmp_path) as connection:
        connection.execute("DELETE FROM server_state")
    with pytest.raises(RunError, match=r"must have a finished round to be used, got none"):
        TrainedClient.open(tmp_path, 0)


@pytest.mark.parametrize("client", ["client_3", "Client-3", "3", 3])
def test_a_client_has_a_name_and_a_number(client: str | int, opened: LoadedRun) -> None:
    assert opened.number(client) == 3


@pytest.mark.parametrize("client", ["nobody", "4", 4, -1, "-1", "", "²"])
def test_an_unknown_client_is_told_who_there_is(client: str | int, opened: LoadedRun) -> None:
    told = r"client must be one of the 4 clients of the run \(client_0, client_1, client_2, client_3\) or a number in 0\.\.3"
    with pytest.raises(ConfigError, match=told):
        opened.number(client)


def test_a_misspelt_client_is_told_with_one_like_it(opened: LoadedRun) -> None:
    with pytest.raises(ConfigError, match=r"got 'cient_3'; did you mean 'client_3'"):
        opened.number("cient_3")


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["global", "after_local"])
def test_a_client_predicts_at_the_point_it_was_evaluated_at(at: str, files: dict[str, Path], tmp_path: Path) -> None:
    done = run(tiny_settings(tmp_path, at, federation={"rounds": 2, "evaluate_at": at}))
    assert_reproduced(LoadedRun.open(done), files)


def test_a_run_that_is_still_on_predicts_from_its_last_round(files: dict[str, Path], tmp_path: Path) -> None:
    federation = {"rounds": 3, "evaluate_every": 1}
    with pytest.raises(Stopped):
        run(tiny_settings(tmp_path, "on", federation=federation), observer=StopAfter(1))
    opened = LoadedRun.open(next(tmp_path.glob("on*")))
    assert opened.round == 1
    assert_reproduced(opened, files)


def test_simulated_nodes_have_the_states_beside_the_run_file(files: dict[str, Path], tmp_path: Path) -> None:
    assert_reproduced(LoadedRun.open(run_remotely(tiny_settings(tmp_path, "post"))), files)


def test_images_in_parts_are_those_at_once(tmp_path: Path) -> None:
    """Parts as large as the batches of an evaluation, one generator: the draws of a Bayesian prompt are the same."""
    federation = {"rounds": 1, "evaluation_batch": 4}
    client = TrainedClient.open(
        run(tiny_settings(tmp_path, "b", method={"name": "pfedbayespt"}, federation=federation)), 0
    )
    pixels = client.pixels([TinySource().image(place) for place in range(10)])
    at_once, generator = client.predict(pixels).draws, client.stream()
    parts = [client.predict(pixels[start : start + 4], generator).draws for start in (0, 4, 8)]
    assert len(at_once) > 1
    assert torch.equal(torch.cat(parts, 1), at_once)
    assert not torch.equal(at_once[0], at_once[1])


# -- sites ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federated(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run over sites, and the folder with the directories of their nodes."""
    folder = tmp_path_factory.mktemp("federated")
    data = {"source": "tiny", "train_per_cell": 2, "test_per_cell": 1, "classes": CLASSES}
    values = tiny_settings(folder / "runs", "sites", data=data, engine={"kind": "flower"})
    return SitesExperiment(values).federate(SiteRecorder(sites_with(files, folder / "sites"))), folder / "sites"


def test_a_site_predicts_with_the_state_of_its_node(federated: tuple[Run, Path], files: dict[str, Path]) -> None:
    done, folder = federated
    opened = LoadedRun.open(done)
    for number, name in enumerate(done.clients):
        client = TrainedClient.open(opened, name, state=folder / name)
        assert correct(client, files[name]) == done.evaluations(2)[number]["correct"]


def test_the_server_cannot_predict_for_a_site(federated: tuple[Run, Path]) -> None:
    told = r"client 'client_1' keeps its own tensors at its site: predict there, .* the node's directory as state="
    with pytest.raises(RunError, match=told):
        TrainedClient.open(federated[0], 1)


def test_the_state_of_another_node_is_refused(federated: tuple[Run, Path]) -> None:
    with pytest.raises(RunError, match=r"^state must be the directory of the node of 'client_1'"):
        TrainedClient.open(federated[0], 1, state=federated[1] / "client_0")


def test_a_run_with_states_of_its_own_takes_no_others(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^state must be absent if the run file contains the clients' states"):
        TrainedClient.open(finished, 1, state=tmp_path)


def test_a_new_client_of_sites_needs_no_state(federated: tuple[Run, Path], files: dict[str, Path]) -> None:
    assert adapt(federated[0], files["client_0"], epochs=1).name == "newcomer"


# -- images and numbers -----------------------------------------------------------------------------------------------


def test_files_images_and_pixels_are_the_same_to_it(client: TrainedClient, tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    pixels = resized(image, client.backbone.shape.image_size, "squash")[None]
    expected = client.probabilities(pixels)
    for picture in (image, np.asarray(image), tmp_path / "a.png", str(tmp_path / "a.png")):
        assert torch.equal(client.probabilities([picture]), expected)


def test_images_are_resized_as_in_the_run(tmp_path: Path) -> None:
    data = {"source": "tiny", "train_per_cell": 2, "test_per_cell": 1, "resize": "crop"}
    client = TrainedClient.open(run(tiny_settings(tmp_path, "crop", data=data, federation={"rounds": 1})), 0)
    picture = np.zeros((10, 30, 3), dtype=np.uint8)
    picture[:, 10:20] = 255
    assert client.pixels([picture]).min() > 200, "the black sides are cut off"


@pytest.mark.parametrize(
    ("pictures", "rule"),
    [
        ([], "pictures must hold at least one image"),
        (np.zeros((1, 8, 8, 3), np.uint8), r"pixels must be uint8 of shape \(images, 16, 16, 3\)"),
        (np.zeros((1, 16, 16, 3)), r"pixels must be uint8 .* got 'float64"),
        ([np.zeros((8, 8), np.uint8)], r"picture must be uint8 of shape \(height, width, 3\)"),
        (["missing.png"], r"image must be readable: missing\.png"),
    ],
)
def test_what_is_no_image_is_refused(pictures: Any, rule: str, client: TrainedClient) -> None:
    with pytest.raises(DataError, match=rule):
        client.predict(pictures)


def test_uncertainty_is_that_of_the_formula() -> None:
    """Two sure draws that contradict each other, and two undecided ones that agree."""
    found = Prediction(torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64))
    assert found.probabilities.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert found.entropy.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert found.mutual_information is not None
    assert found.mutual_information.tolist() == pytest.approx([math.log(2), 0.0])


def test_one_draw_has_no_mutual_information() -> None:
    assert Prediction(torch.tensor([[[0.9, 0.1]]], dtype=torch.float64)).mutual_information is None


def test_an_image_for_a_backbone_of_sentences_is_named_and_not_printed() -> None:
    with pytest.raises(DataError, match=r"sentence must be a text: the backbone reads sentences, got 'Image'$"):
        text(Image.new("RGB", (2, 2)))


@pytest.mark.parametrize("several", [[], (), iter([])], ids=["list", "tuple", "iterator"])
def test_no_text_at_all_is_refused_like_no_image(settings: Any, several: Any) -> None:
    reader = {"data": {"source": "tiny-text"}, "backbone": {"name": "tiny-bert"}, "federation": {"rounds": 1}}
    client = run(settings(name="texts", **reader)).client(0)
    assert len(client.predict(["two", "words"]).labels) == 2
    with pytest.raises(DataError, match="pictures must hold at least one image"):
        client.predict(several)
