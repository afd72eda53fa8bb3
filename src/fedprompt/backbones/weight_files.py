"""Reading weight files: safetensors only, checked. Pickle is never opened, because opening it runs code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedprompt.errors import BackboneError, StorageError, broken
from fedprompt.io.bounded_read import read_json
from fedprompt.io.safetensors_header import FILE, read_header

WEIGHTS = "model.safetensors"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
INDEX_BYTES = 2**24
ALIGNED = 64  # bytes, a cache line
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}


def read_file(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    if path.suffix in PICKLES:
        raise BackboneError(
            f"backbone.name must not be a pickle file, because opening one runs code, got {str(path)!r}. {_CONVERT}"
        )
    if not path.is_file():
        raise BackboneError(broken("backbone.name", "name an existing safetensors file", str(path)))
    _check_sha256([path], sha256)
    return read_described(path)[0]


def read_described(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The memory-mapped tensors of one safetensors file, and its metadata."""
    try:
        with path.open("rb") as stream:
            header = read_header(stream, path.stat().st_size, FILE)
        return load_file(path), header.metadata
    except (SafetensorError, ValueError) as error:
        raise BackboneError(f"{str(path)!r} must be an intact safetensors file: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def write_described(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file whose tensors begin at multiples of `ALIGNED`, as torch's own do: sums over rows that begin
    elsewhere may round differently. Those of an odd size come last, without padding.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNED != 0, -tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    reached = 0
    for name in order:
        tensor, begin = tensors[name], reached
        reached += tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, reached]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)


def read_folder(folder: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of a `transformers` folder, in one file or in shards.

    A sha256 is that of `model.safetensors`, or of all shards one after the other in the order of their names.
    """
    if (folder / WEIGHTS).is_file():
        shards = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        shards = [folder / name for name in _shard_names(folder / INDEX)]
    else:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        instead = (
            f"only {pickled[0]!r}, a pickle, which is never opened because that runs code. {_CONVERT}"
            if pickled
            else "neither"
        )
        raise BackboneError(f"the backbone folder {str(folder)!r} must hold {WEIGHTS} or {INDEX}, got {instead}")
    _check_sha256(shards, sha256)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        found, _ = read_described(shard)
        for name in sorted(found.keys() & tensors.keys())[:1]:
            raise BackboneError(broken(f"the shards in {str(folder)!r}", "hold every tensor once", name))
        tensors |= found
    return tensors


def read_open_clip(folder: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of an open_clip folder."""
    for name in (OPEN_CLIP_WEIGHTS, WEIGHTS):
        if (folder / name).is_file():
            return read_file(folder / name, sha256)
    raise BackboneError(
        f"the backbone folder {str(folder)!r} must hold {OPEN_CLIP_WEIGHTS}, got none. A pickle is never opened, because that runs "
        "code. Convert it on a machine where you trust it, and save it with `safetensors.torch.save_file`."
    )


_CONVERT = (
    "On a machine where you trust the file, load it with transformers and save it again with "
    "`model.save_pretrained(folder)`, which writes safetensors; many hub models also have a revision with safetensors."
)


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index, INDEX_BYTES)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackboneError(f"{str(index)!r} must map tensors to shards under `weight_map`: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise BackboneError(broken(str(index), "name files in the same folder", name))
    return names


def _check_sha256(paths: list[Path], expected: str | None) -> None:
    if expected is None:
        return
    sha = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                sha.update(piece)
    if sha.hexdigest() != expected:
        raise BackboneError(f"backbone.sha256 of {str(paths[0])!r} must be {expected}, got {sha.hexdigest()}")
