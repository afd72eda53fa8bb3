"""What an export holds, how honest it is about it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented_code import PLAIN, documented_logits, outcomes
from PIL import Image
from remote_run import tiny_settings
from safetensors.torch import load_file
from support import run
from transformers import AutoImageProcessor, CLIPVisionModel, Dinov2Model, ViTConfig, ViTModel

from fedprompt.backbones.random_weights import TINY_CLIP_SHAPE, TINY_SHAPE, random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.core import registry
from fedprompt.data.cache.pixel_store import normalise
from fedprompt.errors import BackboneError, ConfigError, StorageError
from fedprompt.inference.export import export, places
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.static_prompts import tangent
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.inference.transformers_model import as_transformers, check_same
from fedprompt.methods.pep_fedpt import PEPFedPT
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

SHAPES = {
    "ViT": TINY_SHAPE,
    "CLIPVision": TINY_CLIP_SHAPE,
    "DeiT": dataclasses.replace(TINY_SHAPE, extra_tokens=1),
    "Dinov2": dataclasses.replace(TINY_SHAPE, layer_scale=True),
    "Dinov2WithRegisters": dataclasses.replace(TINY_SHAPE, layer_scale=True, extra_tokens=4),
    "Dinov2, gated": dataclasses.replace(TINY_SHAPE, layer_scale=True, mlp="swiglu", mlp_width=88),
}


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def folder(client: TrainedClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported client with its backbone."""
    place = tmp_path_factory.mktemp("export") / "exported"
    export(client, place, with_backbone=True)
    return place


def own_logits(client: TrainedClient, image: Image.Image) -> torch.Tensor:
    images = client.images(client.pixels([image]))
    batch = client.batch(images)
    with torch.no_grad():
        return client.method.logits(client.world, client.params, client.forward(images, batch, {}), batch, {})[0]


def test_the_documented_code_gives_the_logits_of_an_image_of_another_size(
    client: TrainedClient, folder: Path, image: Image.Image
) -> None:
    found = documented_logits(folder.parent, image)
    torch.testing.assert_close(found, own_logits(client, image), atol=1e-4, rtol=1e-4)


def test_the_script_of_an_export_does_not_import_fedprompt(folder: Path) -> None:
    assert not re.findall(r"(from|import) fedprompt", (folder / "load_client.py").read_text() + PLAIN)


def test_the_page_says_of_every_method_what_becomes_of_it() -> None:
    said = outcomes()
    kin = tuple(name[:-1] for name in said if name.endswith("*"))
    assert not [name for name in registry.methods() if name not in said and not name.startswith(kin)]


def test_cropping_is_that_of_the_run(settings: Any, tmp_path: Path, image: Image.Image) -> None:
    values = settings(data={"resize": "crop"}, federation={"rounds": 1})
    client = TrainedClient.open(run(values), 0)
    export(client, tmp_path / "exported", with_backbone=True)
    found = documented_logits(tmp_path, image)
    torch.testing.assert_close(found, own_logits(client, image), atol=1e-4, rtol=1e-4)


def test_a_run_on_a_model_folder_is_loaded_by_its_name_at_another_resolution(
    settings: Any, tmp_path: Path, image: Image.Image
) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    model = ViTModel(ViTConfig(**shape, patch_size=4, image_size=24), add_pooling_layer=False)
    model.save_pretrained(tmp_path / "model")
    backbone = {"name": str(tmp_path / "model"), "image_size": 16, "mean": [0.5] * 3, "std": [0.5] * 3, "stem": 1}
    client = TrainedClient.open(run(settings(backbone=backbone, federation={"rounds": 1})), 0, trust_config=True)
    said = export(client, tmp_path / "exported")
    assert said["backbone"]["call"] == {"interpolate_pos_encoding": True}
    code = PLAIN.replace('Client("exported")', f'Client("exported", backbone={said["backbone"]["name"]!r})')
    found = documented_logits(tmp_path, image, code=code)
    torch.testing.assert_close(found, own_logits(client, image), atol=1e-4, rtol=1e-4)


class TestFiles:
    def test_are_those_of_the_page_and_none_is_a_pickle(self, folder: Path) -> None:
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        names = {name for name in names if "__pycache__" not in name}  # other tests run the script
        assert names == {
            "client.safetensors",
            "client.json",
            "parameters.safetensors",
            "preprocessor_config.json",
            "README.md",
            "load_client.py",
            "backbone/config.json",
            "backbone/model.safetensors",
            "backbone/preprocessor_config.json",
        }

    def test_parameters_are_those_the_client_predicts_with(self, client: TrainedClient, folder: Path) -> None:
        found = load_file(folder / "parameters.safetensors")
        assert set(found) == set(client.params)
        assert all(torch.equal(found[name], tensor) for name, tensor in client.params.items())

    def test_the_card_says_where_it_comes_from(self, client: TrainedClient, folder: Path) -> None:
        said = json.loads((folder / "client.json").read_text())
        assert said["exact"]
        assert said["agreement"]["same_class"] == 1.0
        assert said["agreement"]["largest_difference"] < 1e-4
        assert said["run"]["config_hash"] == client.config.digest()
        assert said["backbone"]["digest"] == client.opened.run.reader.fact("backbone")
        assert said["classes"] == list(client.class_names)
        result = client.opened.run.evaluations(2)[0]
        assert said["metrics"]["accuracy"] == result["correct"] / result["samples"]
        assert said["agreement"]["accuracy"] == said["metrics"]["accuracy"]

    def test_the_page_for_people_names_what_is_private(self, client: TrainedClient, folder: Path) -> None:
        text = (folder / "README.md").read_text()
        assert all(f"`{name}`" in text for name in client.world.roles.local)
        for heading in ("## Use", "## Meant for", "## Limits", "## Privacy"):
            assert heading in text
        assert "It computes what fedprompt computes for this client." in text

    def test_the_preprocessor_prepares_images_as_fedprompt_does(
        self, client: TrainedClient, folder: Path, image: Image.Image
    ) -> None:
        backbone = client.backbone
        expected = normalise(client.pixels([image]), backbone.mean, backbone.std, torch.float32, "cpu")
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        found = processor(image, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


class TestBackbones:
    @pytest.mark.parametrize("kind", SHAPES)
    def test_compute_the_same_in_transformers(self, kind: str) -> None:
        backbone = random_vit(SHAPES[kind])
        model = as_transformers(backbone)
        assert type(model).__name__ == kind.split(",")[0] + "Model"
        assert check_same(model, backbone) < 1e-4

    @pytest.mark.parametrize(("kind", "cls"), [("CLIPVision", CLIPVisionModel), ("Dinov2", Dinov2Model)])
    def test_are_loaded_from_their_folder(self, kind: str, cls: Any, tmp_path: Path) -> None:
        backbone = random_vit(SHAPES[kind])
        as_transformers(backbone).save_pretrained(tmp_path)
        assert check_same(cls.from_pretrained(tmp_path).eval(), backbone) < 1e-4

    def test_a_difference_is_noticed(self) -> None:
        backbone = random_vit()
        model = as_transformers(backbone)
        model.layernorm.bias.data += 0.01
        with pytest.raises(BackboneError, match=r"must compute the same to 0\.0001, got 0\.01"):
            check_same(model, backbone)

    @pytest.mark.parametrize(
        "shape",
        [
            dataclasses.replace(TINY_SHAPE, extra_tokens=2),
            dataclasses.replace(TINY_SHAPE, mlp="swiglu"),
            dataclasses.replace(TINY_SHAPE, layer_scale=True, mlp_width=60),
        ],
    )
    def test_that_transformers_does_not_know_are_refused(self, shape: ViTShape) -> None:
        with pytest.raises(BackboneError, match="must be"):
            as_transformers(random_vit(shape))


class TestPlaces:
    """The rows that stay and the rows that join, by the rules of `modules/insertion.py`; T = 17."""

    def test_deep_prompts_are_replaced_before_every_layer(self) -> None:
        tokens = torch.randn(3, 2, 32)
        found, order = places((TokenPrompt(tokens, (0, 1, 2)),), random_vit())
        assert all(torch.equal(found[f"enter.{number}"], tokens[number]) for number in range(3))
        assert all(found[f"keep.{number}"].tolist() == list(range(17)) for number in range(3))
        assert order == [17, 18]

    def test_appended_prompts_stay_and_a_dropped_slot_leaves(self) -> None:
        growing = TokenPrompt(torch.randn(2, 1, 32), (0, 2), mode="append")
        leaving = TokenPrompt(torch.randn(1, 2, 32), (0,), after="drop")
        found, order = places((growing, leaving), random_vit())
        assert found["keep.1"].tolist() == [*range(17), 17]
        assert found["enter.1"].shape == (0, 32)
        assert found["keep.2"].tolist() == [*range(17), 17]
        assert torch.equal(found["enter.2"], growing.tokens[1])
        assert order == [17, 18]

    def test_layers_are_counted_with_the_stem(self) -> None:
        slot = TokenPrompt(torch.randn(1, 2, 32), (0,))
        found, _ = places((slot,), dataclasses.replace(random_vit(), stem=2))
        assert set(found) == {"keep.2", "enter.2"}


class TestTangent:
    def test_of_a_linear_map_is_the_map(self) -> None:
        weight, bias = torch.randn(3, 4), torch.randn(3)
        found = tangent(lambda x: x @ weight.T + bias, torch.randn(5, 4))
        torch.testing.assert_close(found[0], weight)
        torch.testing.assert_close(found[1], bias, atol=1e-5, rtol=1e-5)
        assert found[2]

    def test_of_a_square_is_told_not_to_be_it(self) -> None:
        features = torch.tensor([[1.0], [3.0]])
        weight, bias, linear = tangent(lambda x: x.square(), features)
        assert (float(weight), float(bias), linear) == (4.0, -4.0, False)  # at 2: 4 x - 4


class TestApproximation:
    @pytest.fixture
    def mixed(self, settings: Any) -> TrainedClient:
        """Class prompts large enough that it matters which of them are mixed."""
        method = PEPFedPT(temperature=0.01, kappa=0.0)
        opened = LoadedRun.open(run(settings(federation={"rounds": 1}), method), method=method)
        client = TrainedClient.open(opened, 0)
        grown = {"class_prompts": client.params["class_prompts"] * 20, "head.weight": torch.eye(5, 32)}
        return dataclasses.replace(client, params={**client.params, **grown})

    def test_must_be_asked_for(self, mixed: TrainedClient, tmp_path: Path) -> None:
        rule = r"has no exact export: prompts are the mean over 20 images of the client\. On its test images .*approximate=True"
        with pytest.raises(ConfigError, match=rule):
            export(mixed, tmp_path / "exported")
        assert not (tmp_path / "exported").exists()

    def test_is_called_one_and_measured(self, mixed: TrainedClient, tmp_path: Path) -> None:
        said = export(mixed, tmp_path / "exported", approximate=True)
        assert not said["exact"]
        assert said["agreement"]["largest_difference"] > 1e-4
        assert "**This is an approximation**" in (tmp_path / "exported/README.md").read_text()


class TestRefusals:
    def test_a_folder_that_is_not_empty(self, client: TrainedClient, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(
            ConfigError, match=r"^folder must be a folder that does not exist yet, or an empty one, got"
        ):
            export(client, tmp_path)
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]

    def test_a_place_that_cannot_be_written(self, client: TrainedClient, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot write"):
            export(client, tmp_path / "file" / "exported")

    def test_an_empty_folder_is_filled(self, client: TrainedClient, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        export(client, tmp_path / "empty")
        assert (tmp_path / "empty/client.json").is_file()
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_without_the_images_of_the_run_an_exact_export_says_what_it_was_measured_on(tmp_path: Path) -> None:
    from remote_run import exported

    files = exported(tiny_settings(tmp_path, "files"), tmp_path / "files")
    source = tmp_path / "all.parquet"
    next(iter(files.values())).rename(source)
    values = tiny_settings(tmp_path, "gone")
    values["data"], values["partition"] = {"source": str(source)}, {"scheme": "iid", "clients": 2}
    client = TrainedClient.open(run(values), 0)
    source.unlink()
    said = export(client, tmp_path / "exported")
    assert said["exact"]
    assert said["agreement"]["on"].startswith("noise images")
    assert said["agreement"]["accuracy"] is None
