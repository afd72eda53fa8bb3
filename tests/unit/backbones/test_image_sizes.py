"""Which side images have where a config does not say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import experiment, run

from fedprompt import Experiment
from fedprompt.backbones.catalog import NAMED
from fedprompt.backbones.image_sizes import cpu_side, own_sides
from fedprompt.client.factory import ExperimentFactory
from fedprompt.config import BackboneConfig, config_files
from fedprompt.federation.observer import Observer
from fedprompt.papers import paper_configs

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("patch", "own", "side"),
    [(14, 518, 98), (16, 224, 112), (16, 384, 112), (8, 224, 104), (32, 224, 224), (16, 96, 96)],
)
def test_on_a_cpu_a_side_has_98_pixels_and_7_patches_and_is_never_above_the_own(
    patch: int, own: int, side: int
) -> None:
    assert cpu_side(patch, own) == side


def test_the_run_on_a_cpu_holds_the_number_and_says_it(settings: Any) -> None:
    made = Experiment(settings(backbone={"name": "dinov2-small"}))
    assert made.config.backbone.image_size == 98
    assert made.notes == ("images at 98 px: a CPU default; backbone.image_size=518 for the backbone's own",)
    assert made.config.digest() == Experiment(made.config).config.digest()


@pytest.mark.parametrize("given", [{"device": "cuda"}, {"device": "mps"}, {"image_size": 518}, {"image_size": 56}])
def test_on_a_gpu_and_where_a_side_is_given_nothing_is_chosen(settings: Any, given: dict[str, Any]) -> None:
    made = Experiment(settings(backbone={"name": "dinov2-small", **given}))
    assert made.config.backbone.image_size == given.get("image_size")
    assert made.notes == ()


@pytest.mark.parametrize("name", sorted(NAMED.keys() - {"dinov2-small"}))
def test_other_backbones_of_ours_keep_their_own_side(settings: Any, name: str) -> None:
    assert Experiment(settings(backbone={"name": name})).config.backbone.image_size is None


def test_an_absent_side_in_a_stored_config_is_still_the_backbones_own(settings: Any) -> None:
    """Whatever opens a run file goes through the factory."""
    assert ExperimentFactory(settings(backbone={"name": "dinov2-small"})).config.backbone.image_size is None


SIDES = {"patch_size": 16, "image_size": 224}


@pytest.mark.parametrize("values", [SIDES, {"vision_config": SIDES}])
def test_sides_of_a_folder_are_those_of_its_config(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert own_sides(BackboneConfig(name=str(tmp_path))) == (16, 224)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "{", '{"patch_size": [16, 16], "image_size": 224}', '{"vision_config": 3}']
)
def test_a_folder_that_does_not_say_its_sides_keeps_them(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert own_sides(BackboneConfig(name=str(tmp_path))) is None


def test_sides_of_a_file_are_those_of_its_tensors(tmp_path: Path) -> None:
    shapes = {
        "pos_embed": (1, 197, 192),
        "patch_embed.proj.weight": (192, 3, 16, 16),
        "blocks.0.norm1.weight": (192,),
        "blocks.0.mlp.fc1.weight": (768, 192),
        "blocks.0.mlp.fc2.weight": (192, 768),
    }
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "vit.safetensors")
    assert own_sides(BackboneConfig(name=str(tmp_path / "vit.safetensors"))) == (16, 224)


def test_every_config_of_a_paper_says_its_side_or_has_a_backbone_with_a_side_of_its_own() -> None:
    for each in paper_configs.experiments():
        for config in config_files.load(each.path):
            assert config.backbone.image_size is not None or config.backbone.name in NAMED, each.name


def test_an_observer_hears_what_was_chosen(settings: Any) -> None:
    heard: list[str] = []

    class Listening(Observer):
        def started(self, *_: Any) -> None:
            heard.append("started")

        def noted(self, sentence: str) -> None:
            heard.append(sentence)

    made = experiment(settings(federation={"rounds": 1}))
    made.notes = ("images at 98 px",)
    made.run(observer=Listening())
    assert heard == ["started", "images at 98 px"]
    run(settings(name="silent", federation={"rounds": 1}), observer=Listening())
    assert heard[2:] == ["started"]
