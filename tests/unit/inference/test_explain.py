"""What an explanation says, and how it is drawn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import run

from fedprompt.errors import ConfigError, StorageError
from fedprompt.inference.explain import Explanation, explain
from fedprompt.inference.explanation_page import draw, page, write
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.methods.fedlora import FedLoRA
from fedprompt.methods.head_tune import HeadTune
from fedprompt.methods.pep_fedpt import PEPFedPT
from fedprompt.methods.pfedbayespt import PFedBayesPT
from fedprompt.methods.promptfl import PromptFL

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8))


@pytest.fixture
def trained(settings: Any) -> Callable[..., TrainedClient]:
    def make(method: Any) -> TrainedClient:
        values = settings(data={"train_per_cell": 2, "test_per_cell": 1}, federation={"rounds": 1})
        return TrainedClient.open(LoadedRun.open(run(values, method), method=method), 0)

    return make


def test_what_is_explained_is_what_is_predicted(client: TrainedClient, picture: Image.Image) -> None:
    found = explain(client, picture)
    np.testing.assert_allclose(found.probabilities, client.probabilities([picture])[0], atol=1e-6)


@pytest.mark.parametrize("block", ["last", "0", "1", "rollout"])
def test_shares_of_attention_sum_to_one_with_and_without(
    client: TrainedClient, picture: Image.Image, block: str
) -> None:
    found = explain(client, picture, block)
    assert sum(found.prompted.shares.values()) == pytest.approx(1)
    assert sum(found.plain.shares.values()) == pytest.approx(1)
    assert found.prompted.shares["prompts"] > 0 == found.plain.shares["prompts"]


@pytest.mark.parametrize("block", ["3", "-1", "first", "", "1.0"])
def test_a_block_that_is_not_there_is_refused(client: TrainedClient, picture: Image.Image, block: str) -> None:
    with pytest.raises(ConfigError, match=r"^block must be last, rollout or a number in 0\.\.2, got"):
        explain(client, picture, block)


def test_without_prompts_both_maps_and_both_predictions_agree(
    trained: Callable[..., TrainedClient], picture: Image.Image
) -> None:
    found = explain(trained(HeadTune()), picture)
    np.testing.assert_allclose(found.prompted.patches, found.plain.patches, atol=1e-7)
    np.testing.assert_allclose(found.probabilities, found.plain_probabilities, atol=1e-6)
    assert not found.in_images
    assert not found.differs
    assert "only the head is trained" in found.changes


def test_text_prompts_leave_the_image_tower_alone(trained: Callable[..., TrainedClient], picture: Image.Image) -> None:
    found = explain(trained(PromptFL(context_tokens=2)), picture)
    np.testing.assert_allclose(found.prompted.patches, found.plain.patches, atol=1e-7)
    assert (found.in_images, found.differs) == (False, True)
    assert "learned words (2)" in found.changes
    assert "a photo of a" in found.plain_means


def test_changed_weights_are_no_prompt_tokens(trained: Callable[..., TrainedClient], picture: Image.Image) -> None:
    found = explain(trained(FedLoRA()), picture)
    assert (found.in_images, found.tokens) == (True, 0)
    assert found.prompted.shares["prompts"] == 0
    assert "weights of the image tower are changed in blocks 0-2" in found.changes


def test_the_mixture_of_class_prompts_is_by_class_name_and_sums_to_one(
    trained: Callable[..., TrainedClient], picture: Image.Image
) -> None:
    client = trained(PEPFedPT(query="inline"))
    (mixed,) = explain(client, picture).mixtures
    assert mixed.parts == client.class_names
    assert sum(mixed.weights) == pytest.approx(1)
    assert mixed.order == sorted(range(5), key=lambda part: -mixed.weights[part])


def test_the_draws_of_a_bayesian_prompt_are_told_one_by_one(
    trained: Callable[..., TrainedClient], picture: Image.Image
) -> None:
    client = trained(PFedBayesPT(predict_draws=3))
    found = explain(client, picture)
    assert found.draws.shape == (3, 5)
    np.testing.assert_allclose(found.draws, client.predict([picture]).draws[:, 0], atol=1e-6)
    assert found.to_json()["classes"][0]["std_over_draws"] == pytest.approx(found.draws[:, 0].std())


def test_the_likeliest_class_without_prompts_is_always_among_those_shown(
    client: TrainedClient, picture: Image.Image
) -> None:
    found = dataclasses.replace(
        explain(client, picture),
        draws=np.array([[0.4, 0.3, 0.15, 0.1, 0.05]]),
        plain_probabilities=np.array([0.1, 0.1, 0.1, 0.1, 0.6]),
    )
    assert found.top(3) == [0, 1, 4]
    assert found.top(5) == [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def found(client: TrainedClient, picture: Image.Image) -> Explanation:
    return dataclasses.replace(explain(client, picture), client="<b>$x & y", image="<script>")


class TestDrawing:
    def test_numbers_are_json(self, found: Explanation) -> None:
        said = json.loads(json.dumps(found.to_json()))
        assert len(said["attention"]["with_prompts"]["patches"]) == 4
        assert sum(each["with_prompts"] for each in said["classes"]) == pytest.approx(1)

    @pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
    def test_a_file_is_what_its_ending_says(self, found: Explanation, tmp_path: Path, ending: str) -> None:
        path = write(found, tmp_path / "new" / f"picture{ending}")
        begins = {".png": b"\x89PNG", ".svg": b"<svg", ".html": b"<!doctype html>"}[ending]
        assert path.read_bytes().startswith(begins)
        assert b"var(--" not in path.read_bytes() or ending == ".html"

    def test_a_page_needs_no_other_file_and_takes_names_literally(self, found: Explanation) -> None:
        text = page(found, "<svg></svg>")
        assert "<script" not in text
        assert "http" not in text
        assert "&lt;b&gt;$x &amp; y" in text

    def test_panels_are_those_of_the_method(self, found: Explanation) -> None:
        titles = {axes.get_title("left") for axes in draw(found).axes}
        assert {"Image", "Without prompts", "With prompts", "Difference", "Likeliest classes"} <= titles

    def test_another_ending_is_refused(self, found: Explanation, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^path must end in .png, .svg, .html or be a folder, got"):
            write(found, tmp_path / "picture.gif")

    def test_a_place_that_cannot_be_written_is_told(self, found: Explanation, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot write"):
            write(found, tmp_path / "file" / "picture.png")


def test_the_picture_has_its_own_resolution_and_the_part_that_the_backbone_sees(
    client: TrainedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))
    found = explain(client, wide)
    assert (found.pixels.shape, found.size) == ((60, 90, 3), client.backbone.shape.image_size)
    assert (found.pixels == np.asarray(wide)).all()
    panel = draw(found).axes[0]
    assert panel.get_images()[0].get_array().shape == (60, 90, 3)  # type: ignore[union-attr]
    assert "90 × 60 pixels" in panel.get_xlabel()
    cropped = client.config.data.model_copy(update={"resize": "crop"})
    monkeypatch.setattr(TrainedClient, "config", client.config.model_copy(update={"data": cropped}))
    assert (client.own_pixels(wide, 1000) == np.asarray(wide)[:, 15:75]).all()
    assert client.own_pixels(wide, 30).shape == (30, 30, 3)


def test_the_answer_is_right_or_wrong_where_the_label_is_known(client: TrainedClient, picture: Image.Image) -> None:
    unknown = explain(client, picture)
    names = unknown.class_names
    first, last = (int(number) for number in np.argsort(-unknown.probabilities)[[0, -1]])
    chance = f"Predicted: {names[first]}, {100 * unknown.probabilities[first]:.1f} %."
    assert unknown.answer == chance
    right, wrong = (explain(client, picture, label=names[number].upper()) for number in (first, last))
    assert right.answer == f"{chance} Right."
    assert wrong.answer == f"{chance} Wrong: it is {names[last]}."
    assert [found.to_json()["right"] for found in (unknown, right, wrong)] == [None, True, False]
    assert wrong.answer in page(wrong, "")
    with pytest.raises(ConfigError, match="--label must be a class of the run"):
        explain(client, picture, label="nothing")


def test_the_folder_of_an_image_is_its_label_if_it_has_the_name_of_a_class(
    client: TrainedClient, picture: Image.Image, tmp_path: Path
) -> None:
    name = client.world.class_names[1]
    for folder, label in ((name, 1), ("elsewhere", None)):
        (tmp_path / folder).mkdir()
        picture.save(tmp_path / folder / "x.png")
        assert explain(client, tmp_path / folder / "x.png").label == label


def test_a_map_of_one_colour_says_so(client: TrainedClient, picture: Image.Image) -> None:
    found = explain(client, picture)
    even = dataclasses.replace(found.plain, patches=np.full_like(found.plain.patches, 1 / found.plain.patches.size))
    labels = [axes.get_xlabel() for axes in draw(dataclasses.replace(found, plain=even, prompted=even)).axes[1:4]]
    share = f"{100 / even.patches.size:.3g} %"
    assert labels == [f"one colour: {share} everywhere"] * 2 + ["one colour: 0 % everywhere"]
