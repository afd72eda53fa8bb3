"""A client's model as files that plain `transformers`, safetensors and torch can use; see docs/export.md.

| file | what is in it |
|---|---|
| `client.safetensors` | prompt tokens, the classifier, and the layers between them |
| `client.json` | how these fit together, the classes, and their origin |
| `parameters.safetensors` | everything the client's method predicts with, under its own names |
| `preprocessor_config.json` | size and normalisation of images, in the format of `transformers` |
| `README.md` | the model card |
| `load_client.py` | loads the folder without fedprompt |
| `backbone/` | with `with_backbone`: the frozen backbone as a `transformers` folder |
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.errors import ConfigError, DataError, RunError, StorageError, argument, broken
from fedprompt.inference import load_client
from fedprompt.inference.exported_client import CARD, FORMAT
from fedprompt.inference.in_memory_images import require_images
from fedprompt.inference.model_card import facts, readme
from fedprompt.inference.static_prompts import SAME, Agreement, Constant, constant, projection_of
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.inference.transformers_model import architecture, as_transformers, changed_parameters, check_same
from fedprompt.modules.insertion import TokenPrompt, leaves
from fedprompt.tensors import Tensors

REFERENCE = 256  # largest number of training images for means of prompts that depend on the image
BACKBONE = "backbone"
SCRIPT = "load_client.py"


def export(
    client: TrainedClient, folder: Path, with_backbone: bool = False, approximate: bool = False
) -> dict[str, Any]:
    """Write the client to a new folder and return the content of `client.json`.

    A model that needs fedprompt is refused, unless `approximate` allows an approximation.
    """
    _require_new(folder)
    require_images(client.backbone, "an export")
    fixed, agreement = measured(client)
    exact = not fixed.replaced and agreement.largest_difference <= SAME
    if not exact and not approximate:
        raise ConfigError(
            f"{client.config.label} has no exact export: {'; '.join(fixed.replaced) or 'rounding'}. On {agreement.on} such a "
            f"model agrees with the client's own on the class of {agreement.same_class:.1%} of {agreement.images} images; "
            f"{argument('approximate=True', '--approximate')} writes it anyway"
        )
    tensors, read = handed(fixed, client.backbone)
    described = describe(client, fixed, agreement, exact, read, with_backbone)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise StorageError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
    try:
        _write(part, client, tensors, described, with_backbone)
        if folder.exists():
            folder.rmdir()
        part.chmod(0o755)
        part.rename(folder)
    except OSError as error:
        raise StorageError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return described


def measured(client: TrainedClient) -> tuple[Constant, Agreement]:
    """The constant model of a client and how well it agrees with the client's own, on its test images if they are
    available.
    """
    try:
        bank = client.opened.bank()
        train, test = (bank.images(client.index, part) for part in ("train", "test"))
        reference = train if len(train) else test
        chosen = np.linspace(0, len(reference) - 1, min(len(reference), REFERENCE)).astype(int)
        fixed = constant(client, reference.store.pixels(reference.indices[chosen]))
        if len(test):
            pixels = test.store.pixels(test.indices)
            return fixed, Agreement.measured(client, fixed, pixels, test.labels.cpu(), "its test images")
    except (ConfigError, DataError, RunError) as error:  # an untrusted path counts as unavailable
        side = client.backbone.shape.image_size
        noise = np.random.default_rng(0).integers(0, 256, (16, side, side, 3), dtype=np.uint8)
        fixed = constant(client, noise)
        if fixed.replaced:
            raise ConfigError(
                f"{client.config.label} has no exact export, and an approximate one needs the client's images: {error}"
            ) from error
        return fixed, Agreement.measured(client, fixed, noise, None, "noise images, because its own are not available")
    return fixed, Agreement.measured(
        client, fixed, reference.store.pixels(reference.indices), None, "its training images"
    )


def handed(fixed: Constant, backbone: ViT) -> tuple[Tensors, list[list[int]]]:
    """The tensors of `client.safetensors`, and which rows of the last hidden state are read."""
    found, order = places(fixed.slots, backbone)
    lead, tokens = backbone.shape.lead, backbone.shape.tokens
    read = [[0], *([row] for row in order)] if "prompts" in fixed.reads else [[0]]
    if backbone.shape.ln_pre:  # in transformers the final norm of a CLIP comes after the last hidden state
        found |= {f"norm.{part}": backbone.weights[f"norm.{part}"] for part in ("weight", "bias")}
    if {"image", "image_raw"}.intersection(fixed.reads):
        found |= {f"projection.{name}": tensor for name, tensor in projection_of(backbone, fixed.reads).items()}
        if isinstance(backbone, DualEncoder) and backbone.averages_patches:
            read.append(list(range(lead, tokens)))
    changes = changed_parameters(dict(fixed.changes), backbone.shape, backbone.stem) if fixed.changes else {}
    found |= {f"added.{name}": change for name, change in changes.items()}
    found |= {"classifier.weight": fixed.weight, "classifier.bias": fixed.bias}
    return {name: _plain(tensor) for name, tensor in found.items()}, read


def places(slots: tuple[TokenPrompt, ...], backbone: ViT) -> tuple[Tensors, list[int]]:
    """`keep.i`, the rows that stay before layer i, and `enter.i` (n, d), those that join after them; and the places of
    the prompts that remain after the last layer, slot by slot.
    """
    tokens = backbone.shape.tokens
    found: Tensors = {}
    rows: list[int] = []  # of the prompts in the sequence: the slot of each
    for block in range(backbone.depth):
        stay = [place for place, slot in enumerate(rows) if not leaves(slots[slot], block - 1)]
        entering = [slot for slot in range(len(slots)) if block in slots[slot].blocks]
        if len(stay) < len(rows) or entering:
            fresh = [slots[slot].tokens[list(slots[slot].blocks).index(block)] for slot in entering]
            joining = torch.cat([backbone.weights["lead"][:0], *fresh])
            if backbone.shape.ln_pre and backbone.stem + block == 0:
                joining = backbone._norm("ln_pre", joining)  # in transformers it comes before the first layer
            number = backbone.stem + block
            found[f"keep.{number}"] = torch.tensor([*range(tokens), *(tokens + place for place in stay)])
            found[f"enter.{number}"] = joining
        rows = [rows[place] for place in stay]
        rows += [slot for slot in entering for _ in range(slots[slot].tokens.shape[-2])]
    order = [
        tokens + place
        for slot in range(len(slots))
        for place, each in enumerate(rows)
        if each == slot and not leaves(slots[slot], backbone.depth - 1)
    ]
    return found, order


def describe(
    client: TrainedClient,
    fixed: Constant,
    agreement: Agreement,
    exact: bool,
    read: list[list[int]],
    with_backbone: bool,
) -> dict[str, Any]:
    """The content of `client.json`."""
    backbone, config = client.backbone, client.config
    kind, _ = architecture(backbone.shape)
    own_size = backbone.native_image_size == backbone.shape.image_size or with_backbone
    interpolates = not own_size and not kind.startswith("Dinov2")  # which always interpolates
    return {
        "format": FORMAT,
        "exact": exact,
        "replaced": list(fixed.replaced),
        "agreement": asdict(agreement),
        "classes": list(client.class_names),
        "image": {
            "size": backbone.shape.image_size,
            "resize": config.data.resize,
            "mean": list(backbone.mean),
            "std": list(backbone.std),
        },
        "backbone": {
            "class": kind,
            "folder": BACKBONE if with_backbone else None,
            "name": Path(config.backbone.name).name if with_backbone else config.backbone.name,
            "revision": config.backbone.revision,
            "digest": client.opened.run.reader.fact("backbone"),
            "call": {"interpolate_pos_encoding": True} if interpolates else {},
        },
        "read": read,
        "norm_eps": backbone.shape.norm_eps,
        "unit_length": "image" in fixed.reads,
        **facts(client),
    }


def _write(
    folder: Path, client: TrainedClient, tensors: Tensors, described: Mapping[str, Any], with_backbone: bool
) -> None:
    save_file(tensors, folder / "client.safetensors", metadata={"format": "pt"})
    parameters = {name: _plain(tensor) for name, tensor in client.params.items()}
    save_file(parameters, folder / "parameters.safetensors", metadata={"format": "pt"})
    _dump(folder / CARD, described)
    shutil.copyfile(load_client.__file__, folder / SCRIPT)
    preprocessing = preprocessor(client)
    _dump(folder / "preprocessor_config.json", preprocessing)
    (folder / "README.md").write_text(readme(described), encoding="utf-8")
    if with_backbone:
        from transformers.utils import logging

        model = as_transformers(client.backbone)
        check_same(model, client.backbone)
        logging.disable_progress_bar()
        model.save_pretrained(folder / BACKBONE)
        _dump(folder / BACKBONE / "preprocessor_config.json", preprocessing)


def preprocessor(client: TrainedClient) -> dict[str, Any]:
    """Size and normalisation in the format of `transformers`. Its cropping may differ from ours by a row of pixels."""
    side, crop = client.backbone.shape.image_size, client.config.data.resize == "crop"
    return {
        "image_processor_type": "ViTImageProcessor" if not crop else "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side} if crop else {"height": side, "width": side},
        "resample": 3,
        **({"do_center_crop": True, "crop_size": {"height": side, "width": side}} if crop else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(client.backbone.mean),
        "image_std": list(client.backbone.std),
    }


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, numbers in at least float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).clone(memory_format=torch.contiguous_format)


def _dump(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _require_new(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ConfigError(
            broken(argument("folder", "--output"), "be a folder that does not exist yet, or an empty one", str(folder))
        )
