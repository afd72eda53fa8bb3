"""A client in a folder or a repository of the hub: what leaves it, and what comes back. There is no network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from remote_run import tiny_settings
from support import run
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.errors import ConfigError, RunError, StorageError
from fedprompt.inference.trained_client import TrainedClient

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> TrainedClient:
    """A client of a method that shares all it predicts with."""
    method = {"name": "fedvpt", "prompt_tokens": 2, "head": "shared"}
    settings = tiny_settings(tmp_path_factory.mktemp("hub"), "common", method=method, federation={"rounds": 1})
    return TrainedClient.open(run(settings), "client_1")


@pytest.fixture(scope="module")
def folder(common: TrainedClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "client"
    common.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 20, 24, 3), dtype=np.uint8)


class TestWhatLeaves:
    def test_a_head_of_its_own_does_not_leave_unasked(self, client: TrainedClient, tmp_path: Path) -> None:
        rule = r"include_local must be true to write tensors that never left the client \(head\.bias, head\.weight\)"
        with pytest.raises(ConfigError, match=rule):
            client.save_pretrained(tmp_path / "client")
        assert list(tmp_path.iterdir()) == []

    def test_nor_to_the_hub(self, client: TrainedClient, hub: list[Any]) -> None:
        with pytest.raises(ConfigError, match="include_local must be true"):
            client.push_to_hub("someone/client")
        assert hub == []

    def test_it_leaves_with_include_local(self, client: TrainedClient, tmp_path: Path) -> None:
        client.save_pretrained(tmp_path / "client", include_local=True)
        assert (tmp_path / "client/client.safetensors").is_file()

    def test_means_over_images_are_local_as_well(self, common: TrainedClient, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="include_local must be true for an approximate export"):
            common.save_pretrained(tmp_path / "client", approximate=True)

    def test_the_place_of_the_images_does_not(self, folder: Path) -> None:
        assert json.loads((folder / "client.json").read_text())["data"]["source"] == "tiny"


class TestAFolder:
    def test_predicts_as_the_client_of_the_run(self, common: TrainedClient, folder: Path, pictures: np.ndarray) -> None:
        found = TrainedClient.from_pretrained(folder).predict(list(pictures))
        expected = common.predict(list(pictures))
        torch.testing.assert_close(found.probabilities, expected.probabilities, atol=1e-4, rtol=0)
        assert found.labels == expected.labels

    def test_is_predicted_with_on_the_command_line(
        self, common: TrainedClient, folder: Path, pictures: np.ndarray, tmp_path: Path
    ) -> None:
        Image.fromarray(pictures[0]).save(tmp_path / "image.png")
        done = CliRunner().invoke(app, ["predict", str(folder), str(tmp_path / "image.png"), "--json"])
        said = json.loads(done.stdout)
        assert said["client"] == "client_1"
        assert said["predictions"][0]["top"][0]["class"] == common.predict(pictures[0]).labels[0]

    def test_has_a_header_that_the_hub_reads(self, folder: Path) -> None:
        _, header, page = (folder / "README.md").read_text().split("---\n", 2)
        said = yaml.safe_load(header)
        assert (said["library_name"], said["pipeline_tag"]) == ("fedprompt", "image-classification")
        assert "fedvpt" in said["tags"]
        assert "# client_1, fedvpt" in page

    def test_is_data_only_for_fedprompt(self, folder: Path, tmp_path: Path) -> None:
        place = shutil.copytree(folder, tmp_path / "client")
        (place / "load_client.py").write_text("raise SystemExit('run')")
        assert TrainedClient.from_pretrained(place).name == "client_1"

    @pytest.mark.parametrize(
        ("change", "rule"),
        [
            ({"format": "other"}, "format must be 'fedprompt-export-1', got 'other'"),
            ({"classes": []}, "classes must have at least 1 item"),
            ({"image": {"size": 10**6}}, "image.size must be less than or equal to 4096"),
        ],
    )
    def test_with_a_bad_card_is_refused(self, folder: Path, tmp_path: Path, change: Any, rule: str) -> None:
        place = shutil.copytree(folder, tmp_path / "client")
        card = json.loads((place / "client.json").read_text())
        (place / "client.json").write_text(json.dumps({**card, **change}))
        with pytest.raises(RunError, match=rule):
            TrainedClient.from_pretrained(place)

    def test_names_no_class_of_transformers_but_backbones(self, folder: Path, tmp_path: Path) -> None:
        place = shutil.copytree(folder, tmp_path / "client")
        card = json.loads((place / "client.json").read_text())
        card["backbone"]["class"] = "pipeline"
        (place / "client.json").write_text(json.dumps(card))
        with pytest.raises(RunError, match=r"the backbone must be one of ViTModel, .*, got 'pipeline'"):
            TrainedClient.from_pretrained(place)

    def test_without_its_backbone_needs_one(self, common: TrainedClient, folder: Path, tmp_path: Path) -> None:
        common.save_pretrained(tmp_path / "client", with_backbone=False)
        with pytest.raises(RunError, match=r"backbone must be given: .* was exported without it"):
            TrainedClient.from_pretrained(tmp_path / "client")
        found = TrainedClient.from_pretrained(tmp_path / "client", backbone=folder / "backbone")
        assert found.class_names == common.class_names


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A hub in a folder; the calls that it got."""
    calls: list[Any] = []

    class Api:
        def __init__(self, token: str | None = None) -> None:
            self.token = token

        def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
            calls.append(("create", repo_id, private, self.token))
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> str:
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id)
            calls.append(("upload", repo_id, commit_message))
            return f"https://hub/{repo_id}"

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append(("download", repo_id, options["revision"], options["allow_patterns"]))
        if not (tmp_path / "hub" / repo_id).is_dir():
            raise OSError("no such repository")
        return str(tmp_path / "hub" / repo_id)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


class TestTheHub:
    def test_what_was_pushed_comes_back(self, common: TrainedClient, hub: list[Any], pictures: np.ndarray) -> None:
        assert common.push_to_hub("someone/client", token="secret") == "https://hub/someone/client"
        back = TrainedClient.from_pretrained("someone/client", revision="main")
        assert back.predict(list(pictures)).labels == common.predict(list(pictures)).labels
        assert [call[0] for call in hub] == ["create", "upload", "download"]

    def test_a_repository_is_private_unless_stated_otherwise(self, common: TrainedClient, hub: list[Any]) -> None:
        common.push_to_hub("someone/client")
        assert hub[0] == ("create", "someone/client", True, None)

    def test_no_code_is_downloaded(self, hub: list[Any]) -> None:
        with pytest.raises(StorageError, match="client must be an exported folder, or a repository of the hub"):
            TrainedClient.from_pretrained("someone/nothing")
        assert hub == [("download", "someone/nothing", None, ["*.json", "*.safetensors", "README.md"])]
