"""The side of images of a new run whose config gives none: the backbone's own on a GPU, a smaller one on a CPU.

The time of a step grows with the number of patches: DINOv2 at its own 518 pixels has 1369, at 98 pixels 49. The chosen side goes
into the config of the run. In the config of a run file, an absent side is the backbone's own. Commands that only look at configs
need this, so it imports torch only where it reads a weight file.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from fedprompt.backbones.catalog import NAMED
from fedprompt.backbones.hub_download import OPEN_CLIP, hub_folder, is_hub_id
from fedprompt.config import BackboneConfig, Config
from fedprompt.config.registries import BACKBONES
from fedprompt.errors import BackboneError
from fedprompt.io.bounded_read import read_json
from fedprompt.io.safetensors_header import FILE, read_header

LEAST_SIDE, LEAST_PATCHES = 98, 7  # on a CPU: of an image, in pixels and in patches


def cpu_side(patch: int, own: int) -> int:
    """The smallest side with at least 98 pixels and 7 patches in a row, and at most the backbone's own side."""
    return min(patch * max(LEAST_PATCHES, -(-LEAST_SIDE // patch)), own)


def with_image_size(config: Config) -> tuple[Config, str | None]:
    """The config of a new run, and a sentence about the side of its images where that is a default of CPUs."""
    given = config.backbone
    if given.image_size is not None or given.device != "cpu":
        return config, None
    found = own_sides(given)
    if found is None or (side := cpu_side(*found)) == found[1]:
        return config, None
    sentence = f"images at {side} px: a CPU default; backbone.image_size={found[1]} for the backbone's own"
    return config.model_copy(update={"backbone": given.model_copy(update={"image_size": side})}), sentence


def own_sides(config: BackboneConfig) -> tuple[int, int] | None:
    """Sides of the patches and images of a backbone, without reading its weights; None where they are not known.

    What is wrong with a folder or a file is said when its weights are read.
    """
    if config.name in NAMED:
        if NAMED[config.name].sentences:
            return None
        return NAMED[config.name].patch, NAMED[config.name].image_size
    if config.name in BACKBONES or config.name.partition(":")[0] in BACKBONES.others():
        return None
    path = Path(config.name).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".safetensors":
        return _of_file(path)
    return (
        _of_folder(hub_folder(config.name, config.revision, ["config.json", OPEN_CLIP]))
        if is_hub_id(config.name)
        else None
    )


def _of_folder(folder: Path) -> tuple[int, int] | None:
    try:
        values = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        if "model_type" not in values and (folder / OPEN_CLIP).is_file():
            patch, side = _of_open_clip(read_json(folder / OPEN_CLIP)["model_cfg"]["vision_cfg"])
        else:
            values = values.get("vision_config", values)
            patch = values["patch_size"]
            side = values["image_size"] if "num_patches" not in values else patch * math.isqrt(values["num_patches"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = type(patch) is int and type(side) is int and 0 < patch <= side
    return (patch, side) if whole else None


def _of_open_clip(values: dict[str, Any]) -> tuple[Any, Any]:
    """A ResNet states no patch, and a ViT of timm only in its name."""
    patch = 32 if isinstance(values.get("layers"), list) else values.get("patch_size", 16)
    if "timm_model_name" in values:
        named = re.search(r"_patch(\d+)", values["timm_model_name"])
        patch = int(named[1]) if named else _of_mobile_clip(values["timm_model_name"])
    return patch, values.get("image_size", 224)


def _of_mobile_clip(name: str) -> int | None:
    return {"fastvit_mci": 32, "vit_base_mci": 16}.get(name.rstrip("_0123456789"))


def _of_file(path: Path) -> tuple[int, int] | None:
    import torch

    from fedprompt.backbones.assemble import infer_shape
    from fedprompt.backbones.key_mapping import canonical

    try:
        with path.open("rb") as stream:
            entries = read_header(stream, path.stat().st_size, FILE).entries
        shapes = {name: torch.empty(entry.shape, device="meta") for name, entry in entries.items()}
        shape = infer_shape(canonical(shapes), norm_eps=1e-6)
    except (OSError, ValueError, RuntimeError, IndexError, ZeroDivisionError, BackboneError):
        return None
    return shape.patch, shape.image_size
