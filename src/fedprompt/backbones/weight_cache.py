"""Assembled backbones in the cache: one safetensors file each, mapped into memory by all processes that use it.

Reading a checkpoint means renaming, fusing, converting, interpolating and checking its tensors, for some also the import of
`transformers`. All of that gives the same result until a file, a setting or our code changes, so it is done once.

* The name of a cached file is a hash of what it was made from: every source file by place, size, times and inode (the time of
  the last change cannot be set back), the settings that matter, and the code of this room. Sources are read and their
  checksums compared only when one of these changes.
* The file also holds the digest of the backbone, with a code that only the owner of the cache can compute. Every time it is
  opened the digest is computed again from the mapped bytes; if the file has changed, the backbone is assembled again.
* Mapped pages are shared by all processes and copied only for one that writes to them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache as remember
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.projection import Projection, projection
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.text_tower import (
    BidirectionalTower,
    CausalTower,
    FirstTokenTower,
    PaddedTower,
    TextShape,
    TextTower,
)
from fedprompt.backbones.tokenizer import Words
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_described, write_described
from fedprompt.config import BackboneConfig
from fedprompt.io.bounded_read import strict_json
from fedprompt.io.cache_key import NAME, code, folder_key, key_of

FOLDER = "backbones"
LEAST_BYTES = 2**24  # of the weights; smaller ones are assembled as fast as they are mapped
MOST_BYTES = 4 * 2**30  # of all cached files; those opened longest ago are deleted first
_ELSEWHERE = {"device", "autocast"}  # settings that do not change the stored tensors
_TOWERS: dict[str, type[TextTower]] = {
    "causal": CausalTower,
    "bidirectional": BidirectionalTower,
    "first token": FirstTokenTower,
    "padded": PaddedTower,
}
_known: WeakKeyDictionary[ViT, str] = WeakKeyDictionary()


def identity(backbone: ViT) -> str:
    """The digest of a backbone, computed once; `ViT.digest` reads every byte every time."""
    if backbone not in _known:
        _known[backbone] = backbone.digest()
    return _known[backbone]


def kept(config: BackboneConfig, sources: Iterable[Path], cache: Path, build: Callable[[], ViT]) -> ViT:
    """The result of `build` for the sources, mapped from the cache if it is there."""
    sources = list(sources)
    stamps = [_stamp(path) for path in sources]
    if None not in stamps:
        found = _opened(_path(cache, config, stamps), config.device)
        if found is not None:
            return found
    built = build()
    now = [_stamp(path) for path in sources]  # building may have fetched some
    changed = any(before not in (None, after) for before, after in zip(stamps, now, strict=True))
    if changed or None in now or _size(built) < LEAST_BYTES or not _save(built, _path(cache, config, now)):
        return built
    return _opened(_path(cache, config, now), config.device) or built


def _stamp(path: Path) -> list[Any] | None:
    """A value that changes with every change of a file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _path(cache: Path, config: BackboneConfig, stamps: object) -> Path:
    settings = config.model_dump(mode="json", exclude=_ELSEWHERE)
    key = _sha256(json.dumps([code_digest(), settings, stamps], sort_keys=True))
    return cache / FOLDER / f"{key[:32]}.safetensors"


def _code(path: Path, text: str) -> str:
    """A code for this name that needs the secret of the folder."""
    return code(key_of(folder_key(path.parent, create=True), path.name), text.encode()).hex()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@remember
def code_digest() -> str:
    """The code that reads and assembles: when it changes, so may its results."""
    room = Path(__file__).parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(room.glob("*.py")))).hexdigest()


def _size(backbone: ViT) -> int:
    return sum(tensor.nbytes for tensor in _tensors(backbone).values())


def _save(backbone: ViT, path: Path) -> bool:
    """Write it under its name, whole or not at all; False if it cannot be stored."""
    described = _described(backbone)
    if described is None:
        return False
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path.parent)
        text = json.dumps(described)
        with temporary.open("xb") as file:
            write_described(file, _tensors(backbone), {"backbone": text, "mac": _code(path, text)})
        os.replace(temporary, path)
    except OSError:  # a run does not need a cache that can be written
        return False
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def _make_room(folder: Path) -> None:
    """Delete the files opened longest ago until the rest is within the bound; the next one may exceed it. Mapped files stay usable."""
    files = [path for path in folder.iterdir() if path.name != NAME]
    by_age = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in files)
    total = sum(size for _, size, _ in by_age)
    for _, size, path in by_age:
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size


def _opened(path: Path, device: str) -> ViT | None:
    """The backbone in a cached file, on its device; None if there is no such file, or it has changed."""
    if not path.is_file():
        return None
    try:
        tensors, metadata = read_described(path)
        if _code(path, metadata["backbone"]) != metadata["mac"]:
            return None
        described = strict_json(metadata["backbone"])
        backbone = _backbone(described, tensors)
        if identity(backbone) != described["digest"]:
            return None
        if torch.device(device).type != "cpu":
            backbone = _backbone(described, {name: tensor.to(device) for name, tensor in tensors.items()})
            _known[backbone] = described["digest"]
    except Exception:  # a damaged file can cause any error; `build` reports a wrong device
        return None
    with suppress(OSError):
        os.utime(path)
    return backbone


def _tensors(backbone: ViT) -> dict[str, Tensor]:
    parts: dict[str, Mapping[str, Tensor]] = {"vision": backbone.weights}
    if isinstance(backbone, DualEncoder):
        parts["image_projection"] = backbone.image_projection.weights
        parts["text"], parts["text_projection"] = backbone.text.weights, backbone.text.projection.weights
    return {f"{part}/{name}": tensor for part, weights in parts.items() for name, tensor in weights.items()}


def _described(backbone: ViT) -> dict[str, Any] | None:
    """Everything of a backbone except its tensors; None if it or its tokenizer cannot be stored."""
    if type(backbone) not in (ViT, DualEncoder):
        return None
    described = {
        "name": backbone.name,
        "shape": dataclasses.asdict(backbone.shape),
        "mean": backbone.mean,
        "std": backbone.std,
        "native_image_size": backbone.native_image_size,
        "stem": backbone.stem,
        "digest": identity(backbone),
    }
    if not isinstance(backbone, DualEncoder):
        return described
    tower, words = backbone.text, backbone.text.tokenise
    kind = next((name for name, cls in _TOWERS.items() if type(tower) is cls), None)
    if kind is None or not isinstance(words, Words):
        return None
    text = {"kind": kind, "shape": dataclasses.asdict(tower.shape), "start": tower.start, "end": tower.end}
    text |= {"tokenizer": words.to_json(), "more": {"pad": tower.pad} if isinstance(tower, PaddedTower) else {}}
    return {**described, "scale": backbone.scale, "bias": backbone.bias, "text": text}


def _backbone(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ViT:
    vision = ViT(
        described["name"],
        ViTShape(**described["shape"]),
        tuple(described["mean"]),
        tuple(described["std"]),
        _part(tensors, "vision"),
        described["native_image_size"],
        described["stem"],
    )
    if "text" not in described:
        return vision
    from fedprompt.backbones.clip import joined

    text = described["text"]
    tower = _TOWERS[text["kind"]](
        TextShape(**text["shape"]),
        _part(tensors, "text"),
        Words.from_json(text["tokenizer"]),
        text["start"],
        text["end"],
        Projection(_part(tensors, "text_projection")),
        **text["more"],
    )
    image = projection(tensors, "image_projection/")
    return joined(vision, tower, image, described["scale"], described["bias"])


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{part}/")}
