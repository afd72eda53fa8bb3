"""The backbones that have a name of their own, and how others are given. Free of torch: the command line lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Triple = tuple[float, float, float]

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
HALF: Triple = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Named:
    """A backbone whose weights and preprocessing fedprompt itself knows."""

    name: str
    what: str
    source: str
    image_size: int  #: native side in pixels; positions are interpolated to any other multiple of the patch
    mean: Triple
    std: Triple


DINOV2_SMALL = Named(
    name="dinov2-small",
    what="DINOv2 ViT-S/14, 12 blocks, width 384, 22 M parameters",
    source="asset dinov2-small, taken out of a published wheel (see `fedprompt assets`)",
    image_size=518,
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
)
TINY = Named(
    name="tiny",
    what="random ViT with patches of 4 pixels, 3 blocks, width 32; for tests and dry runs",
    source="built in memory from a fixed seed",
    image_size=16,
    mean=HALF,
    std=HALF,
)
NAMED = {named.name: named for named in (DINOV2_SMALL, TINY)}

#: families read through `transformers` configs, by `model_type`
FAMILIES = ("vit", "deit", "dinov2", "dinov2_with_registers")


def catalog() -> list[dict[str, Any]]:
    """Rows for `fedprompt backbones`: the named backbones, then the three other ways in."""
    rows: list[dict[str, Any]] = [
        {
            "name": named.name,
            "what": named.what,
            "source": named.source,
            "image_size": named.image_size,
            "mean": named.mean,
            "std": named.std,
        }
        for named in NAMED.values()
    ]
    families = ", ".join(FAMILIES)
    own = {"image_size": None, "mean": None, "std": None}
    return [
        *rows,
        {
            "name": "<folder>",
            "what": f"a transformers model of type {families}",
            "source": "config.json, model.safetensors, preprocessor_config.json",
            **own,
        },
        {
            "name": "<file>.safetensors",
            "what": "timm, DINOv2 or transformers tensor names",
            "source": "needs backbone.mean and backbone.std",
            **own,
        },
        {
            "name": "<owner>/<model>",
            "what": f"a hub model of type {families}",
            "source": "downloaded once by huggingface_hub; backbone.revision pins it",
            **own,
        },
    ]
