"""Download a hub id to a local folder in the hub library's own cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fedprompt.errors import BackboneError
from fedprompt.io.bounded_read import read_json

_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
OPEN_CLIP = "open_clip_config.json"
_FILES = [
    "config.json",
    "preprocessor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    OPEN_CLIP,
]
_OPEN_CLIP = [
    "open_clip_model.safetensors"
]  # fetched only where there is no other, for many models are published in both layouts


def is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/model."""
    return _ID.match(name) is not None


def _has_type(folder: Path) -> bool:
    """Whether config.json is one of `transformers`; timm has a file of this name too."""
    try:
        return "model_type" in read_json(folder / "config.json")
    except (OSError, ValueError, TypeError):
        return False


def hub_folder(name: str, revision: str | None, files: Sequence[str] = _FILES) -> Path:
    """Download the JSON files and the safetensors of a hub model, or some of them, or find them in the hub cache."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
        if (folder / OPEN_CLIP).is_file() and not (_has_type(folder) and any(folder.glob("model*.safetensors"))):
            return Path(snapshot_download(name, revision=revision, allow_patterns=_OPEN_CLIP))
        return folder
    except Exception as error:  # the hub library raises many kinds, down to those of its HTTP client
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BackboneError(
            f"backbone.name={name!r} could not be had from the hub: {reason}\n"
            "Ways out: (1) on a machine with a hub, download the model, copy the folder here and set backbone.name "
            "to it; (2) fill the hub cache beforehand and set HF_HUB_OFFLINE=1; (3) use backbone.name=dinov2-small, or mini "
            "for methods that read class names, which need only a package registry."
        ) from error
