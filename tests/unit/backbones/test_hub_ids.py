"""A hub id of every family is the folder of the same files: enough of them is downloaded, and no code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from support import throwaway_cache
from unit.backbones import test_clip_resnet as resnet
from unit.backbones import test_dual_encoder as clip
from unit.backbones import test_mobile_clip as mobile
from unit.backbones import test_open_clip as open_clip
from unit.backbones import test_siglip as siglip
from unit.backbones import test_vit_families as vits

from fedprompt.backbones import load_backbone
from fedprompt.config import BackboneConfig

pytestmark = pytest.mark.unit


def in_open_clip(folder: Path) -> Path:
    model = clip.random_clip("gelu")
    return open_clip.written(folder, open_clip.open_clip_tensors(model), open_clip.clip_config(model))


def mobile_clip(folder: Path) -> Path:
    made = mobile.config("fastvit_mci1", mobile.SIDE, "avg", unmasked=True)
    return mobile.folder_of(folder, mobile.filled(mobile.mci_shapes()), made)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    **{name: lambda folder, name=name: vits.saved(vits.random_model(name), folder) for name in vits.FAMILIES},  # type: ignore[misc]
    "clip": lambda folder: clip.saved(clip.random_clip(), folder),
    "siglip": lambda folder: siglip.saved(siglip.random_siglip("siglip"), folder, "siglip"),
    "siglip2": lambda folder: siglip.saved(siglip.random_siglip("siglip2"), folder, "siglip2"),
    "open_clip": in_open_clip,
    "biomedclip": lambda folder: open_clip.biomed_folder(folder, open_clip.biomed()[2]),
    "mobileclip": mobile_clip,
    "clip resnet": lambda folder: resnet.written(folder, resnet.tensors_of(resnet.random_network()), resnet.config()),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that gives what is asked for, and keeps it as the hub's library does."""

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        there, here = tmp_path / "hub" / repo_id, tmp_path / "kept" / repo_id / str(revision)
        here.mkdir(parents=True, exist_ok=True)
        for file in there.iterdir():
            if any(fnmatchcase(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return tmp_path


def loaded(name: str, **settings: Any) -> Any:
    return load_backbone(BackboneConfig(name=name, **settings), throwaway_cache())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hub_id_is_the_folder_of_the_same_files(hub: Path, family: str) -> None:
    folder = hub / "hub" / "someone" / "model"
    folder.mkdir(parents=True)
    FAMILIES[family](folder)
    for name in ("pytorch_model.bin", "open_clip_pytorch_model.bin", "modeling.py"):
        (folder / name).write_bytes(b"never read")
    there = loaded("someone/model", revision="v1")
    kept = hub / "kept" / "someone" / "model" / "v1"
    assert {file.suffix for file in kept.iterdir()} <= {".json", ".safetensors", ".txt"}
    assert there.digest() == loaded(str(folder)).digest()


def test_of_a_model_in_both_layouts_one_is_downloaded(hub: Path) -> None:
    folder = hub / "hub" / "someone" / "both"
    folder.mkdir(parents=True)
    in_open_clip(folder)
    clip.saved(clip.random_clip("gelu"), folder)
    loaded("someone/both")
    weights = [file.name for file in (hub / "kept" / "someone" / "both" / "None").glob("*.safetensors")]
    assert weights == ["model.safetensors"]
